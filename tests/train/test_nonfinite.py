"""Numbers that go bad: the same decision on every rank, and never a bad number that stays."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from helpers.layout_cases import NUM_TOKENS, WIDTH, Case, RandomWindows
from helpers.rank_pool import RankPools
from stretto import CheckpointManager, Layout, Run, TrainConfig, Trainer, World, make_engine
from stretto.checkpoint import find_checkpoint
from stretto.config.toml import parse_config
from stretto.data import Corpus, Position, Window
from stretto.errors import DivergedError
from stretto.nn import GRU, CrossEntropy, Linear, LockedDropout, Pointwise, Stack

BAD = 2  # the window that spoils what it touches


class Fragile(nn.Module):
    """Tokens as vectors; token 0 is not finite."""

    def forward(self, tokens: Tensor) -> Tensor:
        vectors = nn.functional.one_hot(tokens, NUM_TOKENS).to(torch.float64)
        return torch.where(tokens.unsqueeze(-1) == 0, torch.inf, vectors)


@dataclass(frozen=True)
class SpoiledWindows(RandomWindows):
    """Windows without token 0, but for one row of one window."""

    row: int = 4
    bad: int = BAD

    def read(self, position: Position, *, inputs: bool = True, targets: bool = True) -> Window:
        window = super().read(position, inputs=inputs, targets=targets)
        if window.inputs is None:
            return window
        tokens = window.inputs.clamp(min=1)
        if position.index == self.bad:
            tokens[0, window.lanes == self.row] = 0
        return replace(window, inputs=tokens)


def train(world: World, case: Case, layout: Layout, folder: Path | None = None) -> tuple[list[float], int, bool]:
    model = Stack(
        [Pointwise(Fragile()), LockedDropout(0.1), GRU(NUM_TOKENS, WIDTH), Linear(WIDTH, NUM_TOKENS)]
    ).double()
    engine = make_engine(model, CrossEntropy(), layout, world, seed=3)
    data = SpoiledWindows(case, (engine.mesh.replica, layout.replicas))
    config = TrainConfig(steps=case.num_steps, lr=0.1, nonfinite="skip")
    trainer = Trainer(engine, data, config, seed=case.seed)
    losses = [report.loss for report in trainer]
    if folder is not None:
        with CheckpointManager(folder, world) as checkpoints:
            checkpoints.start()
            checkpoints.save(trainer.snapshot(), wait=True)
    finite = all(tensor.isfinite().all() for tensor in (*engine.stack.parameters(), *(trainer.state or ())))
    return losses, trainer.skipped, bool(finite)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", [Layout(replicas=3), Layout(stages=2, chunks=3), Layout(replicas=2, stages=2, micro_batches=2)]
)
def test_a_step_is_skipped_in_every_layout_alike(layout: Layout, pools: RankPools, tmp_path: Path) -> None:
    case = Case(num_rows=9, num_steps=6, is_ragged=False)
    ((expected, skipped, is_finite),) = pools[1].run(train, case, Layout())
    assert [math.isfinite(loss) for loss in expected] == [step != BAD for step in range(6)]
    assert skipped == 1 and is_finite
    for losses, skipped, is_finite in pools[layout.num_ranks].run(train, case, layout, tmp_path):
        assert losses == pytest.approx(expected, rel=1e-9, nan_ok=True)
        assert skipped == 1 and is_finite


def test_a_step_after_a_skipped_first_window_can_be_resumed(tmp_path: Path) -> None:
    world = World(0, 1, torch.device("cpu"))
    case = Case(num_rows=9, num_steps=4, is_ragged=False)

    def trainer() -> Trainer:
        blocks = [Pointwise(Fragile()), GRU(NUM_TOKENS, WIDTH), Linear(WIDTH, NUM_TOKENS)]
        engine = make_engine(Stack(blocks).double(), CrossEntropy(), Layout(), world, seed=3)
        data = SpoiledWindows(case, bad=0)
        return Trainer(engine, data, TrainConfig(steps=4, lr=0.1, nonfinite="skip"), seed=case.seed)

    whole, first, second = trainer(), trainer(), trainer()
    expected = [report.loss for report in whole]
    losses = [first.advance().loss]
    for folder in (tmp_path / "one",):
        with CheckpointManager(folder, world) as checkpoints:
            checkpoints.start()
            checkpoints.save(first.snapshot(), wait=True)
        second.restore(find_checkpoint(folder))
    losses += [report.loss for report in second]
    assert losses == pytest.approx(expected, nan_ok=True, rel=1e-12) and math.isnan(losses[0])


def config_for(corpus: Corpus, folder: Path, **train: object) -> object:
    return parse_config(
        {
            "data": {"train": corpus.location, "lanes": 8, "window": 20},
            "model": {"hidden": 12},
            "train": {"steps": 300, "optimizer": "sgd", "lr": 1e38, **train},
            "run": {"folder": folder},
        }
    )


def test_a_run_that_diverges_stops_and_saves_the_batch(byte_corpus: Corpus, tmp_path: Path) -> None:
    run = Run(config_for(byte_corpus, tmp_path / "run"))  # type: ignore[arg-type]
    with pytest.raises(DivergedError, match=r"has loss .*lower train\.lr=1e\+38.*; the batch is in .*step-\d+-rank-0"):
        list(run.events())
    (path,) = (tmp_path / "run" / "nonfinite").iterdir()
    tensors = load_file(path)
    assert tensors["inputs"].shape == (20, 8) and tensors["targets"].shape == (20, 8)
    assert tensors["state.0"].shape[0] == 8 and {"lanes", "lengths", "fresh"} <= set(tensors)
    assert all(parameter.isfinite().all() for parameter in run.engine.stack.parameters())


def test_too_many_skipped_steps_in_a_row_end_a_run(byte_corpus: Corpus, tmp_path: Path) -> None:
    run = Run(config_for(byte_corpus, tmp_path / "run", nonfinite="skip"))  # type: ignore[arg-type]
    with pytest.raises(DivergedError, match="has loss"):
        list(run.events())
    assert 100 <= run.trainer.skipped <= 110
