"""`stretto show` lists a run's checkpoints, even if the newest launch uses none of them."""

from pathlib import Path

import pytest

from stretto import CheckpointManager
from stretto.checkpoint import Snapshot
from stretto.checkpoint.manifest import TrainingState
from stretto.cli.main import main


def test_checkpoints_from_before_a_resume_from_elsewhere_are_abandoned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = TrainingState(step=5, seed=1, optimizer="sgd", epoch=0, pool=0, index=5, progress=0.5)
    for folder in ("here", "elsewhere"):
        with CheckpointManager(tmp_path / folder) as checkpoints:
            checkpoints.start()
            checkpoints.save(Snapshot(state, []), wait=True)
    with CheckpointManager(tmp_path / "here") as checkpoints:
        checkpoints.start(tmp_path / "elsewhere")
    assert main(["show", str(tmp_path / "here")]) == 2
    printed = capsys.readouterr()
    assert "abandoned" in printed.out and "newest" not in printed.out
    assert "holds no checkpoint" in printed.err
