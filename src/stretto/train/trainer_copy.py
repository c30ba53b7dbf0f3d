"""Copies of a trainer's state in this rank's memory, to go back to an earlier step without a checkpoint.

They are on the device of the tensors themselves, so they take as much memory as the weights, the optimizer's state and
the averages of the weights together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.base.state import State
from stretto.blocks.stack import Stack
from stretto.checkpoint.checkpoint import Checkpoint
from stretto.checkpoint.manifest import TrainingState
from stretto.checkpoint.shards import TensorShard
from stretto.train.trainer_state import Optimizer, allocate_optimizer_state, optimizer_shard, set_optimizer_state
from stretto.train.weight_average import WeightAverage


@dataclass(frozen=True)
class WeightsCopy:
    """What the steps of a run change on one rank: its weights, their averages, and the optimizer's state."""

    weights: dict[str, Tensor]  # parameters and buffers, by name
    optimizer: dict[str, dict[str, Tensor]]  # by parameter name and key
    average: dict[str, Tensor]  # by parameter name
    num_averaged: int

    @classmethod
    def of(cls, stack: Stack, optimizer: Optimizer, average: WeightAverage) -> "WeightsCopy":
        """Copy the tensors of a rank."""
        states = {name: optimizer.state.get(weight, {}) for name, weight in stack.named_weights().items()}
        tensors = {
            name: {key: value for key, value in state.items() if isinstance(value, Tensor)}
            for name, state in states.items()
        }
        return cls(
            _clone(stack.named_tensors()),
            {name: _clone(state) for name, state in tensors.items() if state},
            _clone(average.tensors),
            average.num_averaged,
        )

    @classmethod
    def allocate(cls, stack: Stack, optimizer: Optimizer, checkpoint: Checkpoint, num_averaged: int) -> "WeightsCopy":
        """Return tensors for the copy that a checkpoint has, to read its `shards` into."""
        weights = stack.named_weights() if num_averaged else {}
        return cls(
            {name: torch.zeros_like(tensor) for name, tensor in stack.named_tensors().items()},
            allocate_optimizer_state(stack, optimizer, checkpoint, "copy_optimizer"),
            {name: torch.zeros_like(weight) for name, weight in weights.items()},
            num_averaged,
        )

    def shards(self, stack: Stack) -> list[TensorShard]:
        """Return the tensors as shards, named like those of the state itself, with `copy_` before."""
        shards = [
            TensorShard(f"copy_{kind}.{name}", tensor, *stack.rows_of(name))
            for kind, tensors in (("weights", self.weights), ("average", self.average))
            for name, tensor in tensors.items()
        ]
        for name, state in self.optimizer.items():
            shards += [optimizer_shard(stack, name, key, value, "copy_optimizer") for key, value in state.items()]
        return shards

    @torch.no_grad()
    def restore(self, stack: Stack, optimizer: Optimizer, average: WeightAverage) -> None:
        """Set the tensors of a rank to their copies; these stay as they are, and can be restored again."""
        for name, tensor in stack.named_tensors().items():
            tensor.copy_(self.weights[name])
        set_optimizer_state(stack, optimizer, {name: _clone(state) for name, state in self.optimizer.items()})
        average.tensors, average.num_averaged = _clone(self.average), self.num_averaged


@dataclass(frozen=True)
class TrainerCopy:
    """All that a rank's next step depends on, as `Trainer.copy_state` returns it."""

    training_state: TrainingState
    weights: WeightsCopy
    lanes: State | None  # the state that the next window starts from; steps replace it, and never change its tensors
    rewind_copy: WeightsCopy | None = None  # that a spike of the loss goes back to


def _clone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
