"""StageCopy: what is copied when, and that a copy that fails does not go unnoticed."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.live_model import make_trainer
from stretto import Layout, World
from stretto.train.stage_copy import KeptCopies, StageCopy
from stretto.train.trainer import Trainer


class OwnRing:
    """A ring of one rank, which keeps its own copies; or it fails, as gloo does after a timeout."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def exchange(self, content: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return content


def copy_steps(ring: Any, every: int, num_steps: int) -> tuple[KeptCopies, Trainer]:  # noqa: ANN401
    trainer = make_trainer(World(0, 1, torch.device("cpu")), Layout(), None, num_steps)
    kept = KeptCopies()
    copy = StageCopy(ring, every, kept)
    for _ in trainer:
        copy.update(trainer)
    copy.finish()
    return kept, trainer


def test_the_last_two_copies_are_kept_and_none_is_made_after_the_last_step() -> None:
    kept, _ = copy_steps(OwnRing(), 2, 8)
    assert sorted(kept.own) == sorted(kept.other) == [4, 6]


def test_a_copy_that_fails_while_the_ranks_train_is_a_warning_that_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        kept, trainer = copy_steps(OwnRing(RuntimeError("Timed out waiting 20000ms\nat gloo")), 2, 8)
    assert trainer.step == 8 and not kept.other
    (message,) = caplog.messages
    assert message.startswith(
        "this rank's state was not copied to another one's memory (Timed out waiting 20000ms); if a stage is lost "
    )
