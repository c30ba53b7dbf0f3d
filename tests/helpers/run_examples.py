"""Run example scripts, each rank forked from this process, which has imported their libraries: that takes 15 s.

python run_examples.py NAME=SCRIPT:RANKS[:OPTION] ...    # rank 0 of NAME writes NAME.0.out and NAME.0.err
"""

import faulthandler
import gc
import os
import re
import runpy
import sys
from multiprocessing import get_context

import accelerate  # noqa: F401
import lightning  # noqa: F401
import torch._dynamo  # noqa: F401 - making an optimizer imports it
import transformers

import stretto
from stretto.launch.rank_environment import free_port

SECONDS = 60


def run_rank(name: str, arguments: list[str], rank: int, size: int, port: int) -> None:
    for number, stream in enumerate(("out", "err"), start=1):
        os.dup2(os.open(f"{name}.{rank}.{stream}", os.O_WRONLY | os.O_CREAT), number)
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    # They are imported when they are first used.
    assert callable(transformers.Trainer) and callable(stretto.parallelize)
    gc.freeze()
    context = get_context("fork")
    for run in sys.argv[1:]:
        name, script, size, option = re.findall(r"(\w+)=(.*?):(\d+):?(.*)", run)[0]
        port = free_port()
        arguments = [script, *([option] if option else [])]
        processes = [
            context.Process(target=run_rank, args=(name, arguments, rank, int(size), port), daemon=True)
            for rank in range(int(size))
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode != 0:
                sys.exit(f"{run}: a rank ended with {process.exitcode}; see {name}.*.err")
