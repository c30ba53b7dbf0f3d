"""A rank that is killed: the others end soon and name it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from helpers.layout_cases import Case, run_case
from helpers.rank_pool import RankPool, RanksFailedError
from stretto import Layout, load_config
from stretto.data import Corpus
from stretto.train.start import newest_checkpoint_name


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        pytest.param(Layout(stages=3, chunks=4), 1, marks=pytest.mark.slow),
        pytest.param(Layout(stages=2, chunks=4), 0, marks=pytest.mark.slow),
        (Layout(replicas=2, stages=2, chunks=4), 3),
        (Layout(replicas=3), 2),
    ],
    ids=str,
)
def test_ranks_that_survive_a_sigkill_end_and_name_the_lost_rank(layout: Layout, victim: int) -> None:
    ranks = RankPool(layout.num_ranks)
    ranks.run(run_case, Case(num_rows=9), layout)
    threading.Timer(2.0, lambda: ranks.processes[victim].kill()).start()
    started = time.monotonic()
    with pytest.raises(RanksFailedError) as caught:
        ranks.run(run_case, Case(num_rows=9, num_steps=1_000_000), layout, seconds=60)
    assert time.monotonic() - started < 30
    messages = caught.value.errors
    assert messages.pop(victim) == "ended with code -9"
    position = rf"\(replica {victim // layout.stages}, stage {victim % layout.stages}(, last seen [^)]+)?\)"
    assert len(messages) == layout.num_ranks - 1
    for rank, message in messages.items():
        assert re.match(f"rank {rank} lost rank {victim} {position} while ", message), message
        assert "\n" not in message
    # The store, with all statuses, ends with the rank that hosts it.
    assert victim == 0 or any("last seen" in message for message in messages.values())


@pytest.mark.long
@pytest.mark.short
def test_a_killed_rank_of_a_run_is_named_once_and_nothing_is_left_behind(byte_corpus: Corpus, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'[data]\ntrain = "{byte_corpus.location}"\nlanes = 8\nwindow = 20\n[model]\nhidden = 16\n'
        f"[train]\nsteps = 1000000\n[save]\nevery = 5\n"
        f'[run]\nmax_restarts = 0\nfolder = "{tmp_path / "run"}"\n[layout]\nstages = 2\n'
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto", "train", str(config)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while time.monotonic() < until and newest_checkpoint_name(load_config(config)) is None:
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    victims = [int(pid) for pid in children if b"\0train\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(victims) == 2
    environments = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in victims]
    secrets = {entry for variables in environments for entry in variables if entry.startswith(b"STRETTO_SECRET=")}
    assert len(secrets) == 1 and len(secrets.pop()) == len(b"STRETTO_SECRET=") + 64, "one new secret for both ranks"
    os.kill(victims[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    # Rank 0 may have had the time to report the lost rank.
    *before, last = errors.splitlines()
    assert "rank 1 was killed by SIGKILL, so the other ranks were stopped" in last
    assert re.search(r"; step \d[\d,]* is saved, and the same command resumes from it$", last)
    assert all("rank 0 lost rank 1" in line for line in before) and len(before) <= 1
    assert not Path(f"/proc/{victims[0]}").exists()
