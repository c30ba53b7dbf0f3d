"""TiedWeights: the weights that several stages hold, because blocks on different stages use the same parameter.

An output layer that uses the embedding's weight, in 3 stages of 2 replicas. Each holder has its own copy of the weight:

                stage 0 (embedding)     stage 1     stage 2 (output layer)
    replica 0   W, gradient g0                      W, gradient h0
    replica 1   W, gradient g1                      W, gradient h1

The reducer of the replicas sums each column during the last backward, to g0 + g1 and h0 + h1. Then the holders of each
replica sum their row: all have the gradient g0 + g1 + h0 + h1, so equal optimizers update all copies equally.
"""

from collections.abc import Mapping, Sequence

import torch

from stretto.blocks.stack import Stack
from stretto.mesh.stage_group import StageGroup

Stages = tuple[int, ...]


def find_holders(model: Stack, parts: Sequence[slice], num_stages: int) -> dict[str, Stages]:
    """Return the stages that hold each weight of more than one stage, by its first name, in the order of the model.

    `parts` has the slices of blocks that the stages hold, in rounds over the stages.
    """
    holders: dict[str, set[int]] = {}
    stacks = [model[part] for part in parts]
    for name, first_name in model.tied_names().items():
        for index, stack in enumerate(stacks):
            if stack.has_block_of(name) or stack.has_block_of(first_name):
                holders.setdefault(first_name, set()).add(index % num_stages)
    return {name: tuple(sorted(stage_set)) for name, stage_set in holders.items() if len(stage_set) > 1}


class TiedWeights:
    """This stage's copies of the weights that other stages hold too; `groups` has the group of their holders by name.

    All stages process the weights in the same order, so stages that share several of them don't wait for each other.
    """

    def __init__(self, stack: Stack, groups: Mapping[str, StageGroup]) -> None:
        self.groups = groups
        weights = stack.named_weights() if groups else {}
        self._shared = [(weights[name], group) for name, group in groups.items()]

    @torch.no_grad()
    def copy_from_first_stage(self) -> None:
        """Replace each weight with that of the first stage that holds it."""
        for weight, group in self._shared:
            group.broadcast(weight.data)

    def sum_gradients(self) -> None:
        """Replace the gradient of each weight with the sum over the stages that hold it."""
        for weight, group in self._shared:
            if weight.requires_grad:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                group.all_reduce(weight.grad)
