"""Ranks of real launchers, on disk and in a real object store: the same bytes as from one process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.prepared_files import KINDS, Preparation, content, make_preparation
from helpers.s3_server import s3_server
from helpers.slurm_cluster import slurm
from stretto.errors import DataError
from stretto.prepare.prepare_job import Progress

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--no-python"]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("server")):
        yield "s3://bucket"


def command(preparation: Preparation, target: Path | str) -> list[str]:
    return [sys.executable, "-m", "stretto", "prepare", *preparation.command, "--out", str(target)]


@pytest.mark.long
@pytest.mark.short
def test_three_ranks_of_torchrun_write_the_same_bytes_and_one_prints(tmp_path: Path) -> None:
    preparation = make_preparation("text", tmp_path / "in")
    preparation.run(tmp_path / "plain")
    step = [*TORCHRUN, *command(preparation, tmp_path / "ranks")]
    output = subprocess.run(step, check=True, capture_output=True, text=True, timeout=100).stdout
    assert output.count("train: ") == output.count("valid: ") == 1
    assert content(tmp_path / "ranks") == content(tmp_path / "plain")


def find_rank(rank: int, target: Path) -> int | None:
    """Return the process of a rank that writes to a target; None if it has not started."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            environment = (process / "environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in environment and str(target).encode() in (process / "cmdline").read_bytes():
                return int(process.name)
    return None


@pytest.mark.long
@pytest.mark.parametrize("rank", [2, 0])
def test_a_rank_that_is_killed_in_the_middle_is_started_again_and_the_bytes_are_the_same(
    rank: int, tmp_path: Path
) -> None:
    # Some seconds of work, so that the kill is in the middle of it on a busy machine too.
    preparation, target = make_preparation("text", tmp_path / "in", 20_000), tmp_path / "ranks"
    preparation.run(tmp_path / "plain", workers=1)
    torchrun = [*TORCHRUN[:-1], "--max-restarts", "1", "--monitor-interval", "0.1", TORCHRUN[-1]]
    results = tmp_path / "ranks.partial" / "parts"
    with subprocess.Popen([*torchrun, *command(preparation, target)]) as launcher:
        try:
            until = time.monotonic() + 60
            while (process := find_rank(rank, target)) is None:
                assert time.monotonic() < until and launcher.poll() is None
                time.sleep(0.05)
            while len([*results.glob("write-*")]) < 10:
                assert time.monotonic() < until and launcher.poll() is None
                time.sleep(0.005)
            os.kill(process, signal.SIGKILL)
            num_finished = len([*results.glob("write-*")])
            assert launcher.wait(100) == 0
        finally:
            launcher.kill()
            # The ranks too: torchrun starts each in a session of its own.
            for started in range(3):
                if (process := find_rank(started, target)) is not None:
                    os.kill(process, signal.SIGKILL)
    num_parts = sum(1 for name in content(target) if "/tokens-" in name)
    assert 10 <= num_finished < num_parts and content(target) == content(tmp_path / "plain")


@pytest.mark.slurm
def test_tasks_of_srun_on_two_nodes_write_the_same_bytes(tmp_path: Path) -> None:
    preparation = make_preparation("sequences", tmp_path / "in")
    preparation.run(tmp_path / "plain")
    with slurm(tmp_path / "slurm") as cluster:
        output = cluster.run("srun", "--nodes=2", "--ntasks=2", *command(preparation, tmp_path / "ranks"), seconds=100)
    assert output.count("train: ") == output.count("valid: ") == 1
    assert content(tmp_path / "ranks") == content(tmp_path / "plain")


@pytest.mark.s3
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "text" else pytest.mark.long) for kind in KINDS]
)
def test_a_bucket_gets_the_same_bytes_as_a_folder(kind: str, bucket: str, tmp_path: Path) -> None:
    preparation = make_preparation(kind, tmp_path / "in", 60)
    preparation.run(tmp_path / "plain")
    stores = preparation.run(f"{bucket}/{kind}")
    assert [store.location for store in stores] == [f"{bucket}/{kind}/train", f"{bucket}/{kind}/valid"]
    assert content(f"{bucket}/{kind}") == content(tmp_path / "plain")
    assert not content(f"{bucket}/{kind}.partial")
    with pytest.raises(DataError, match=f"{bucket}/{kind} already holds prepared data; choose a different folder"):
        preparation.run(f"{bucket}/{kind}")


@pytest.mark.s3
@pytest.mark.long
def test_ranks_of_torchrun_write_the_same_bytes_to_a_bucket(bucket: str, tmp_path: Path) -> None:
    preparation = make_preparation("sequences", tmp_path / "in", 60)
    preparation.run(tmp_path / "plain")
    subprocess.run([*TORCHRUN, *command(preparation, f"{bucket}/ranks")], check=True, timeout=200, env=os.environ)
    assert content(f"{bucket}/ranks") == content(tmp_path / "plain")
    assert not content(f"{bucket}/ranks.partial")


@pytest.mark.s3
def test_a_preparation_in_a_bucket_resumes_and_redoes_only_what_has_changed(bucket: str, tmp_path: Path) -> None:
    preparation = make_preparation("series", tmp_path / "in", 30)
    good = preparation.files[4].read_text()
    preparation.files[4].write_text(good.replace("red", "green") + "\n1,red,3")
    target, seen = f"{bucket}/resumed", list[Progress]()
    with pytest.raises(DataError, match=r"4\.csv, row 31: its number of cells is 3"):
        preparation.run(target)
    assert not content(target)
    preparation.files[4].write_text(good)
    preparation.run(target, on_progress=seen.append)
    # Four of five parts were there already.
    finished = sum(path.stat().st_size for path in preparation.files[:4])
    assert seen[0].phase == "finding categories" and seen[0].done == finished
    preparation.run(tmp_path / "plain")
    assert content(target) == content(tmp_path / "plain")
