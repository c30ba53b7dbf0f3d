"""SIGKILL at many points of a save: the next start finds a complete checkpoint, and the end is bitwise the same."""

import os
from pathlib import Path

import pytest

from helpers.train_process import SAVE_EVERY, ReferenceRuns, TrainProcess
from stretto.checkpoint.checkpoint import Checkpoint, all_checkpoint_names, complete_checkpoint_names, read_claims
from stretto.checkpoint.storage import LocalStorage

KILLER = Path(__file__).parent / "killer"
SAVE = 3  # the one to be interrupted
# Layout, rank, and number of points.
CASES = [((1, 1), 0, 16), ((2, 1), 0, 4), ((2, 1), 1, 4), ((1, 2), 1, 4)]
POINTS = [(grid, rank, point, count) for grid, rank, count in CASES for point in range(count)]


def start(folder: Path, data: Path, grid: tuple[int, int], rank: int, line: int) -> TrainProcess:
    environment = {
        "PYTHONPATH": os.pathsep.join([str(KILLER), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "KILL_RANK": str(rank),
        "KILL_SAVE": str(SAVE),
        "KILL_AT": str(line),
        "KILL_COUNT": str(folder) + ".count",
    }
    return TrainProcess(folder, data, grid, {"save.keep": 100}, environment).start()


@pytest.fixture(scope="session")
def num_lines(faults_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[tuple[int, int], int], int]:
    """The number of lines that a rank's save runs, by layout and rank; filled on demand."""
    return {}


def count_lines(
    known: dict[tuple[tuple[int, int], int], int], data: Path, grid: tuple[int, int], rank: int, folder: Path
) -> int:
    if (grid, rank) not in known:
        run = start(folder / "counted", data, grid, rank, -1)
        code, output = run.finish()
        assert code == 0, output
        known[grid, rank] = int(Path(str(folder / "counted") + ".count").read_text())
        assert known[grid, rank] > 100
    return known[grid, rank]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("grid", "rank", "point", "count"),
    POINTS,
)
def test_a_killed_save_leaves_the_earlier_checkpoints_intact(
    grid: tuple[int, int],
    rank: int,
    point: int,
    count: int,
    num_lines: dict[tuple[tuple[int, int], int], int],
    reference_runs: ReferenceRuns,
    faults_data: Path,
    tmp_path: Path,
) -> None:
    expected = reference_runs[grid]
    total = count_lines(num_lines, faults_data, grid, rank, tmp_path)
    # The very last lines may not be reached: how often a rank polls for messages depends on timing.
    run = start(tmp_path / "run", faults_data, grid, rank, 1 + point * (total - 40) // count)
    code, output = run.finish()
    assert code == 0, output
    assert f"rank {rank} was killed by SIGKILL; restarting all ranks" in output, output
    assert run.final_state() == expected

    storage = LocalStorage(tmp_path / "run" / "checkpoints")
    claims = read_claims(storage)
    assert set(claims) == {1, 2}
    # From the interrupted save if it was complete, or else from the one before; both are as they were written.
    assert claims[2].resumed_from in (f"step-{SAVE_EVERY * SAVE:09}-g1", f"step-{SAVE_EVERY * (SAVE - 1):09}-g1")
    names = complete_checkpoint_names(storage)
    assert names == list(all_checkpoint_names(storage)), "incomplete checkpoints are removed"
    assert {SAVE_EVERY * number for number in range(1, SAVE)} <= {name.step for name in names if name.generation == 1}
    for name in names:
        saved = Checkpoint.open(storage, str(name))
        assert [saved.check(file) for file in saved.manifest.files] == [None] * len(saved.manifest.files)
