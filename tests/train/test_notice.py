"""Notices that a machine will be taken away: a command is polled, and a run saves and stops when it says so."""

import http.server
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stretto.checkpoint.checkpoint import find_checkpoint
from stretto.data import Corpus
from stretto.errors import ConfigError
from stretto.train import NoticeWatch

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "run-on-a-cluster.md"


class MetadataServer(http.server.ThreadingHTTPServer):
    """The metadata service of a cloud, on this machine; `answers` are (status, text) by method and path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[tuple[str, str], tuple[int, str]] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: MetadataServer

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.command, path, headers))
        status, text = self.server.answers.get((self.command, path), (404, ""))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    do_PUT = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def metadata_server() -> Iterator[MetadataServer]:
    server = MetadataServer()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def metadata() -> Iterator[MetadataServer]:
    with metadata_server() as server:
        yield server


AWS_TOKEN, AWS = ("PUT", "/latest/api/token"), ("GET", "/latest/meta-data/spot/instance-action")
GOOGLE = ("GET", "/computeMetadata/v1/instance/preempted")
AZURE = ("GET", "/metadata/scheduledevents")
# By the name in the script: what the cloud says on a usual day, what it says before it takes the machine away.
CLOUDS = {
    "AWS": ({AWS_TOKEN: (200, "t0ken")}, {AWS_TOKEN: (200, "t0ken"), AWS: (200, '{"action": "terminate"}')}),
    "Google Cloud": ({GOOGLE: (200, "FALSE")}, {GOOGLE: (200, "TRUE")}),
    "Azure": (
        {AZURE: (200, '{"Events": []}')},
        {AZURE: (200, '{"DocumentIncarnation":1,"Events":[{"EventType":"Preempt"}]}')},
    ),
}


def script_of_the_page(cloud: str, server: MetadataServer) -> str:
    """The script for a cloud, as the page shows it, with the address of this server."""
    (script,) = re.findall(rf"^```bash\n(# {cloud}\n.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    text, count = re.subn(r"169\.254\.169\.254|metadata\.google\.internal", server.address, script)
    assert count >= 1
    return str(text)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_scripts_of_the_page_find_the_notices_of_each_cloud(
    cloud: str, metadata: MetadataServer, tmp_path: Path
) -> None:
    script = tmp_path / "notice.sh"
    script.write_text(script_of_the_page(cloud, metadata))
    usual, notice = CLOUDS[cloud]
    outcomes = []
    for metadata.answers in ({}, usual, notice):
        outcomes.append(subprocess.run(["sh", str(script)], check=False, capture_output=True).returncode == 0)
    assert outcomes == [False, False, True]
    for _, path, headers in metadata.requests:
        # Without these headers, the clouds refuse to answer.
        if path == AWS[1]:
            assert headers["x-aws-ec2-metadata-token"] == "t0ken"
        elif path != AWS_TOKEN[1]:
            assert headers.get("metadata-flavor") == "Google" or headers.get("metadata") == "true"


@pytest.mark.long
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.short), 2])
def test_a_run_saves_and_stops_after_a_notice(
    replicas: int, metadata: MetadataServer, byte_corpus: Corpus, tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'[data]\ntrain = "{byte_corpus.location}"\nlanes = 4\nwindow = 16\n'
        "[model]\nhidden = 8\n[train]\nsteps = 1000000\n"
        f"[layout]\nreplicas = {replicas}\n[save]\nevery = 1000000\nminutes = 0\n"
        f'[run]\nfolder = "{tmp_path}/run"\nnotice_seconds = 0.1\n'
        f'notice_command = "curl --fail --silent --max-time 2 http://{metadata.address}/notice"\n'
    )
    command = [sys.executable, "-m", "stretto", "train", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            until = time.monotonic() + 60
            while '"step": 20,' not in read(tmp_path / "run" / "log.jsonl") or not metadata.requests:
                assert time.monotonic() < until and process.poll() is None
                time.sleep(0.05)
            metadata.answers = {("GET", "/notice"): (200, "soon")}
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 75, output
    assert output.count("that step is saved, so start again to resume") == 1, output
    assert find_checkpoint(tmp_path / "run").manifest.training_state.step >= 20


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_the_callback_is_called_once_and_not_before_the_notice(tmp_path: Path) -> None:
    calls: list[float] = []
    notice = tmp_path / "notice"
    with NoticeWatch(f"test -e '{notice}'", lambda: calls.append(1), seconds=0.01):
        time.sleep(0.3)
        assert not calls
        notice.touch()
        until = time.monotonic() + 10
        while not calls and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.2)
    assert len(calls) == 1


def test_a_command_is_not_run_by_a_shell(tmp_path: Path) -> None:
    called = threading.Event()
    with NoticeWatch(f"sh -c 'touch {tmp_path}/$0' ran ; touch {tmp_path}/spoiled", called.set, seconds=0.01):
        assert called.wait(30)
    assert (tmp_path / "ran").exists() and not (tmp_path / "spoiled").exists()


@pytest.mark.parametrize("command", ["no-such-program --now", "sh -c 'unbalanced", ""])
def test_a_command_that_cannot_be_run_is_refused(command: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"notice_command={command!r}")):
        NoticeWatch(command, lambda: None)


def test_a_command_that_vanishes_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = tmp_path / "notice"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    command = f"{script} https://user:password@host/notice?token=1"
    with caplog.at_level(logging.WARNING), NoticeWatch(command, lambda: None, seconds=0.01):
        script.unlink()
        until = time.monotonic() + 30
        while not any("has failed" in record.getMessage() for record in caplog.records):
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.1)
    assert [record.getMessage() for record in caplog.records if "has failed" in record.getMessage()] == [
        f"notice_command='{script} https://host/notice' has failed ([Errno 2] No such file or directory: "
        f"'{script}'), and is tried again"
    ]
