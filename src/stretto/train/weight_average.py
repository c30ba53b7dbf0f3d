"""WeightAverage: a running average of a rank's weights, which evaluations and the final weights use."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stretto.base.average_trigger import AverageTrigger
from stretto.base.foreach import interpolate_all
from stretto.base.score import Score
from stretto.blocks.stack import Stack
from stretto.checkpoint.manifest import TrainingState
from stretto.checkpoint.shards import TensorShard
from stretto.config.train import TrainConfig


class WeightAverage:
    """The average of the weights after each step from `average_start` on: exponential (`ema`) or equal (`swa`).

    With `nt-asgd`, it is equal and starts when the trigger says so.
    Each weight has its own average, so it moves with the weight to any other layout.
    """

    def __init__(self, config: TrainConfig, stack: Stack) -> None:
        self._config = config
        self._stack = stack
        self._parameters = stack.named_weights()
        self.tensors: dict[str, Tensor] = {}  # by parameter name; empty before the first step that is averaged
        self.num_averaged = 0  # how many steps are averaged
        self.trigger = AverageTrigger()  # of nt-asgd

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the weights after `step`, which counts from 1."""
        start = self.trigger.start if self._config.average == "nt-asgd" else self._config.average_start
        if self._config.average == "none" or start is None or step < start:
            return
        if not self.num_averaged:
            self.tensors = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        elif self.tensors:
            share = 1 - self._config.average_decay if self._config.average == "ema" else 1 / (self.num_averaged + 1)
            interpolate_all(list(self.tensors.values()), list(self._parameters.values()), share)
        self.num_averaged += 1

    def record_score(self, step: int, score: Score) -> None:
        """Tell the trigger of an evaluation after `step`."""
        if self._config.average == "nt-asgd":
            self.trigger = self.trigger.add(step, score, self._config.average_patience)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Use the averages as the weights within this context, if there are any."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def shards(self) -> list[TensorShard]:
        """Return the averages as shards."""
        rows_of = self._stack.rows_of
        return [TensorShard(f"average.{name}", tensor, *rows_of(name)) for name, tensor in self.tensors.items()]

    def allocate(self, training_state: TrainingState) -> list[TensorShard]:
        """Prepare to continue saved averages: return shards to read them into."""
        self.num_averaged = 0 if self._config.average == "none" else training_state.num_averaged
        self.trigger = training_state.average_trigger
        self.tensors = {}
        if self.num_averaged:
            self.tensors = {name: torch.zeros_like(parameter) for name, parameter in self._parameters.items()}
        return self.shards()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, average in self.tensors.items():
            weight = self._parameters[name]
            copy = weight.clone()
            weight.copy_(average)
            average.copy_(copy)
