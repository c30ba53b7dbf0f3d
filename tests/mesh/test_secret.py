"""The secret of a run: where ranks find it, and which files are refused."""

import json
import os
import stat
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from stretto.data import Corpus
from stretto.errors import ConfigError, LostPeerError
from stretto.launch.rank_environment import free_port
from stretto.mesh.secret import find_secret

SOON = timedelta(seconds=10)
RANDOM = "0123456789abcdef"


def test_the_environment_comes_before_the_file_and_an_empty_variable_counts_as_none(tmp_path: Path) -> None:
    assert find_secret({"STRETTO_SECRET": RANDOM}, tmp_path, 0, SOON) == RANDOM.encode()
    assert not (tmp_path / "secret").exists()
    assert find_secret({"STRETTO_SECRET": ""}, None, 0, SOON) is None


def test_a_short_secret_is_refused_and_not_printed() -> None:
    with pytest.raises(ConfigError, match=r"STRETTO_SECRET has 8 characters, so it can be guessed; set it to") as error:
        find_secret({"STRETTO_SECRET": "password"}, None, 1, SOON)
    assert "password" not in str(error.value)


def test_rank_0_creates_a_file_that_only_its_owner_can_read(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "new"
    secrets = {}
    late = threading.Thread(target=lambda: secrets.update({1: find_secret({}, folder, 1, SOON)}))
    late.start()
    time.sleep(0.1)
    secrets[0] = find_secret({}, folder, 0, SOON)
    late.join()
    assert secrets[0] == secrets[1] == find_secret({}, folder, 0, SOON)  # the next launch uses the same
    assert secrets[0] != find_secret({}, tmp_path / "other", 0, SOON)
    assert len(secrets[0] or b"") == 64
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600


def test_launches_that_start_at_the_same_time_use_one_secret(tmp_path: Path) -> None:
    secrets: list[bytes | None] = []
    threads = [threading.Thread(target=lambda: secrets.append(find_secret({}, tmp_path, 0, SOON))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(secrets) == 16 and len({*secrets}) == 1


def test_a_rank_that_does_not_see_the_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LostPeerError, match=r"rank 3 found no secret in .*secret within 0 s.*; check rank 0's output"):
        find_secret({}, tmp_path, 3, timedelta(seconds=0.1))
    (tmp_path / "secret").touch(0o600)  # rank 0 has not written it yet
    with pytest.raises(LostPeerError, match="rank 3 found no secret"):
        find_secret({}, tmp_path, 3, timedelta(seconds=0.1))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_others_may_have_read_or_written_is_refused(rank: int, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    find_secret({}, tmp_path, 0, SOON)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"it has permissions 640, not 600; delete it, or set STRETTO_SECRET on all"):
        find_secret({}, tmp_path, rank, SOON)
    path.rename(tmp_path / "real")
    (tmp_path / "real").chmod(0o600)
    path.symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="it is a symbolic link; delete it"):
        find_secret({}, tmp_path, rank, SOON)
    path.unlink()
    os.mkfifo(path, 0o600)  # must not wait for a writer
    with pytest.raises(ConfigError, match="it is not a file; delete it"):
        find_secret({}, tmp_path, rank, SOON)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    find_secret({}, tmp_path, 0, SOON)
    os.chown(tmp_path / "secret", 12345, -1)
    with pytest.raises(ConfigError, match="it belongs to user 12345, not to user 0; delete it"):
        find_secret({}, tmp_path, 1, SOON)


@pytest.mark.long
def test_our_launcher_gives_its_ranks_a_new_secret(byte_corpus: Corpus, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'[data]\ntrain = "{byte_corpus.location}"\nlanes = 8\nwindow = 20\n[model]\nhidden = 16\n'
        f'[train]\nsteps = 1000000\n[run]\nmax_restarts = 0\nfolder = "{tmp_path / "run"}"\n[layout]\nstages = 2\n'
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto", "train", str(config)], env={**os.environ, "STRETTO_SECRET": "short"},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until and not (tmp_path / "run" / "log.jsonl").exists():
            time.sleep(0.1)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        environments = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in children]
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=60)
    secrets = [
        variable for environment in environments for variable in environment if variable.startswith(b"STRETTO_SECRET=")
    ]
    assert len(secrets) == 2 and len({*secrets}) == 1 and len(secrets[0]) == len(b"STRETTO_SECRET=") + 64
    assert "secret" not in errors
    assert not (tmp_path / "run" / "secret").exists()


SCRIPT = (
    "import stretto, sys\nwith stretto.world(secret_folder=(sys.argv[1:] or [None])[0]) as world: world.barrier()\n"
)


@pytest.mark.parametrize(
    "source", ["none", *(pytest.param(source, marks=pytest.mark.long) for source in ("file", "environment"))]
)
def test_rank_0_warns_once_if_there_is_no_secret(source: str, tmp_path: Path) -> None:
    cluster = {"worker": [f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"]}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *([str(tmp_path)] if source == "file" else [])],
            env={
                **os.environ,
                "GLOO_SOCKET_IFNAME": "lo",
                "STRETTO_SECRET": RANDOM if source == "environment" else "",
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}),
            },
            stderr=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    errors = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    address, _, port = cluster["worker"][0].partition(":")
    warning = (
        "the ranks have no secret to sign their messages with, so whoever can connect to "
        f"{address} port {port} can end this run; set STRETTO_SECRET to the same random text on all nodes\n"
    )
    assert errors == [warning if source == "none" else "", ""]
