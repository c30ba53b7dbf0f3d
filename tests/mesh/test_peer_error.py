"""An error on one rank: all ranks end with it, it is printed once, and no rank keeps waiting."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.rank_pool import RankPool, RanksFailedError
from helpers.row_loss_cases import RaggedRows, RowCase, make_model
from helpers.stores import write_tokens
from stretto import Layout, TrainConfig, Trainer, World, make_engine
from stretto.base.position import Position
from stretto.blocks.losses import SquaredError
from stretto.data import Window
from stretto.errors import DataError
from stretto.nn import Linear, Stack


def fail_alone(world: World, layout: Layout, guilty: int) -> None:
    """One rank raises while the others are in a collective; like the command, it publishes its error and ends."""
    engine = make_engine(Stack([Linear(2, 2), Linear(2, 2)]), SquaredError(), layout, world, seed=1)
    if world.rank == guilty:
        time.sleep(0.5)
        error = DataError("shard 7 is damaged")
        world.publish_error(error)
        raise error
    engine.mesh.world.all_reduce([1.0])


def fail_before_the_mesh(world: World, layout: Layout, guilty: int) -> None:
    """One rank finds its data damaged before it has connected to the others."""
    if world.rank == guilty:
        error = DataError("checksums.bin is damaged")
        world.publish_error(error)
        raise error
    make_engine(Stack([Linear(2, 2), Linear(2, 2)]), SquaredError(), layout, world, seed=1)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "guilty"), [(Layout(replicas=2), 1), (Layout(stages=2), 0)], ids=str)
def test_a_rank_that_fails_before_the_mesh_is_created_ends_all_ranks(layout: Layout, guilty: int) -> None:
    ranks = RankPool(2)
    with pytest.raises(RanksFailedError) as caught:
        ranks.run(fail_before_the_mesh, layout, guilty, seconds=30)
    assert caught.value.errors == dict.fromkeys(range(2), "checksums.bin is damaged")


@pytest.mark.long
@pytest.mark.parametrize(("layout", "guilty"), [(Layout(replicas=3), 0), (Layout(stages=2, replicas=2), 2)], ids=str)
def test_all_ranks_end_with_the_error_of_the_one_that_failed(layout: Layout, guilty: int) -> None:
    ranks = RankPool(layout.num_ranks)
    with pytest.raises(RanksFailedError) as caught:
        ranks.run(fail_alone, layout, guilty, seconds=30)
    assert caught.value.errors == dict.fromkeys(range(layout.num_ranks), "shard 7 is damaged")


class OneWrongSymbol(RaggedRows):
    """Rows of which one, read by the second replica only, has a symbol that the model has no output for."""

    def read(self, position: Position, *, inputs: bool = True, targets: bool = True) -> Window:
        window = super().read(position, inputs=inputs, targets=targets)
        if window.targets is not None and self.part[0] == 1:
            window.targets[0, 0] = 99
        return window


def train_on_a_wrong_symbol(world: World) -> None:
    case = RowCase("ctc")
    engine = make_engine(*make_model(case), Layout(replicas=2, chunks=2), world, seed=3)
    try:
        for _ in Trainer(engine, OneWrongSymbol(case), TrainConfig(steps=3)):
            pass
    except DataError as error:
        world.publish_error(error)  # like the command, and `stretto.world`
        raise


@pytest.mark.long
def test_a_wrong_target_of_one_replica_ends_all_ranks() -> None:
    with pytest.raises(RanksFailedError) as caught:
        RankPool(2).run(train_on_a_wrong_symbol, seconds=30)
    assert caught.value.errors.keys() == {0, 1}
    for message in caught.value.errors.values():
        assert message.startswith("target 0 of a row is 99, which is not a symbol of CTCLoss(blank=0) with 5 outputs")


@pytest.mark.long
@pytest.mark.parametrize("file", ["values-00000.bin", "targets-00000.bin"])
def test_a_flipped_bit_that_only_one_stage_reads_ends_a_run_with_one_message(file: str, tmp_path: Path) -> None:
    rows = [[token % 7 for token in range(3 + row % 9)] for row in range(64)]
    write_tokens(tmp_path / "data", [rows], 7, [[row % 3 for row in range(64)]])
    damaged = bytearray((tmp_path / "data" / file).read_bytes())
    damaged[5] ^= 16
    (tmp_path / "data" / file).write_bytes(damaged)
    (tmp_path / "run.toml").write_text(
        f'[data]\ntrain = "{tmp_path / "data"}"\nbudget = 100\n[model]\nhidden = 8\n[train]\nsteps = 10\n'
        f'[run]\nfolder = "{tmp_path / "run"}"\n[layout]\nstages = 2\n'
    )
    command = [sys.executable, "-m", "stretto", "train", str(tmp_path / "run.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("stretto: error: ") and f"{file} is damaged between bytes 0 and" in done.stderr


def _cut_short(folder: Path) -> None:
    path = folder / "values-00000.bin"
    path.write_bytes(path.read_bytes()[:-3])


def _nothing(folder: Path) -> None:
    pass


@pytest.mark.long
@pytest.mark.parametrize(
    ("spoil", "budget", "micro_batches", "message"),
    [
        (_cut_short, 100, 1, "values-00000.bin has 441 bytes, not 444; copy it again or prepare the data again"),
        pytest.param(
            _nothing, 10, 1, "has 11 time steps, more than data.budget=10; raise the budget", marks=pytest.mark.slow
        ),
        pytest.param(
            _nothing, 100, 40, "layout.replicas=2 x layout.micro_batches=40 exceeds the 64 rows of the data",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_unusable_data_is_reported_once_under_torchrun(
    spoil: Callable[[Path], None], budget: int, micro_batches: int, message: str, tmp_path: Path
) -> None:
    rows = [[token % 7 for token in range(3 + row % 9)] for row in range(64)]
    write_tokens(tmp_path / "data", [rows], 7, [[row % 3 for row in range(64)]])
    spoil(tmp_path / "data")
    (tmp_path / "run.toml").write_text(
        f'[data]\ntrain = "{tmp_path / "data"}"\nbudget = {budget}\n[model]\nhidden = 8\n[train]\nsteps = 3\n'
        f'[run]\nfolder = "{tmp_path / "run"}"\n[layout]\nreplicas = 2\nmicro_batches = {micro_batches}\n'
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "stretto", "train"]
    done = subprocess.run(
        [*command, str(tmp_path / "run.toml")], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode != 0
    messages = [line for line in done.stderr.splitlines() if line.startswith("stretto: error: ")]
    assert len(messages) == 1 and message in messages[0], done.stderr
    assert "exitcode  : 2" in done.stderr, "torchrun reports the rank that failed first"
