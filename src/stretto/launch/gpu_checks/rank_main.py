"""The program of one rank of a check: `python -m stretto.launch.gpu_checks.rank_main CHECK DEVICE FOLDER`."""

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict
from datetime import timedelta
from importlib import import_module
from pathlib import Path

from stretto.base.disk import write_atomic
from stretto.base.errors import StrettoError
from stretto.base.exit import exit_immediately
from stretto.launch.gpu_checks.catalog import KILLED_PEER, find_check
from stretto.launch.gpu_checks.killed_peer import PEER_TIMEOUT_SECONDS
from stretto.launch.gpu_checks.rank_job import STACK_SIGNAL
from stretto.launch.gpu_checks.result import RESULT_FILE
from stretto.launch.parent_exit import exit_when_launcher_dies
from stretto.mesh.join import world
from stretto.mesh.world import TIMEOUT, World

_STATUS_SECONDS = 0.2


def main(name: str, device: str, folder: Path) -> None:
    """Join the other ranks and run this rank's part of a check; rank 0 writes the result."""
    exit_when_launcher_dies()
    rank, check = os.environ["RANK"], find_check(name)
    with (folder / f"rank-{rank}.stack").open("w") as stack_file:
        stack_file.write(f"{threading.get_ident():#018x}\n\n")  # the main thread, as faulthandler prints it
        stack_file.flush()
        faulthandler.register(STACK_SIGNAL, file=stack_file)
        timeout = timedelta(seconds=PEER_TIMEOUT_SECONDS) if check == KILLED_PEER else TIMEOUT
        try:
            with world(device=device, timeout=timeout) as joined:
                _publish_status(joined, folder / f"rank-{rank}.status")
                result = import_module(f"stretto.launch.gpu_checks.{check.module}").run(joined, name, folder)
                if joined.is_rank_zero:
                    write_atomic(folder / RESULT_FILE, json.dumps(asdict(result)).encode())
        except StrettoError as error:
            sys.stderr.write(f"stretto: error: {error}\n")
            exit_immediately(error.exit_code)
        except Exception:  # noqa: BLE001 - a driver may raise anything
            traceback.print_exc()
            exit_immediately(1)
        faulthandler.unregister(STACK_SIGNAL)


def _publish_status(world: World, path: Path) -> None:
    """Write what this rank is doing to a file, from now on, so that it can be read if the rank hangs."""

    def publish() -> None:
        published = ""
        while True:
            status = str(world.status or "running")
            if status != published:
                write_atomic(path, status.encode())
                published = status
            time.sleep(_STATUS_SECONDS)

    path.write_text("running")  # even if the check ends before the thread has started
    threading.Thread(target=publish, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
