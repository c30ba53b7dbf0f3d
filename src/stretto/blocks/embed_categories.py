"""EmbedCategories: replaces the codes of categories among the channels by vectors, as the first block."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stretto.base.errors import ConfigError
from stretto.base.state import State
from stretto.base.task import CategoryInputs
from stretto.blocks.block import Block

_MAX_FEATURES = 50


class EmbedCategories(Block):
    """The channels that are numbers, followed by a vector for each code of a category.

    `categories` are those of the data's `Task`, and `num_inputs` is its number of inputs. A category of n names has
    n + 1 codes and vectors of (n + 2) // 2 features, but at most 50. The vector of code 0, for a missing or unknown
    name, is zero before training. A value that is not a code counts as code 0.
    """

    def __init__(self, num_inputs: int, categories: Sequence[CategoryInputs]) -> None:
        super().__init__()
        self.num_inputs, self.categories = num_inputs, tuple(categories)
        indices = [index for category in self.categories for index in category.inputs]
        if not indices or len(set(indices)) < len(indices) or not all(0 <= index < num_inputs for index in indices):
            raise ConfigError(
                f"EmbedCategories needs categories in different ones of its {num_inputs} inputs, not in {indices}; use "
                "those of the data's task"
            )
        self.numbers = tuple(index for index in range(num_inputs) if index not in indices)
        """The indices of the inputs that are numbers; they come first in the output."""
        self.tables = nn.ModuleList(_CodeEmbedding(category.num_names + 1) for category in self.categories)

    @property
    def num_features(self) -> int:
        """The number of features of the output."""
        widths = (len(category.inputs) * num_features(category.num_names + 1) for category in self.categories)
        return len(self.numbers) + sum(widths)

    def extra_repr(self) -> str:
        return f"{self.num_inputs}, {self.categories}"

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        if x.shape[-1] != self.num_inputs:
            raise ConfigError(f"EmbedCategories has {self.num_inputs} inputs, but got {x.shape[-1]}; make them equal")
        parts = [_select(x, self.numbers)] if self.numbers else []
        for category, table in zip(self.categories, self.tables, strict=True):
            vectors: Tensor = table(_to_codes(_select(x, category.inputs), category.num_names))
            parts.append(vectors.flatten(-2))  # [time, rows, inputs, features]
        return torch.cat(parts, dim=-1), state


def num_features(num_codes: int) -> int:
    """Return how many features the vector of a code has."""
    return min(_MAX_FEATURES, (num_codes + 1) // 2)


class _CodeEmbedding(nn.Embedding):
    """An embedding whose first vector is zero before training."""

    def __init__(self, num_codes: int) -> None:
        super().__init__(num_codes, num_features(num_codes))

    def reset_parameters(self) -> None:
        # Uniform, of variance 1 as scaled channels: torch's normal random numbers depend on the CPU's instructions.
        nn.init.uniform_(self.weight, -(3**0.5), 3**0.5)
        with torch.no_grad():
            self.weight[0] = 0


def _select(x: Tensor, indices: Sequence[int]) -> Tensor:
    """Return some features of `x`; slices of runs, since a list of indices would be copied to the device each time."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1]:
            runs[-1][1] = index + 1
        else:
            runs.append([index, index + 1])
    parts = [x[..., start:stop] for start, stop in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _to_codes(values: Tensor, num_names: int) -> Tensor:
    """Return values as integers; 0 for all that are not between 1 and `num_names`, such as NaN."""
    if values.is_floating_point() and num_names > 2 / torch.finfo(values.dtype).eps:
        raise ConfigError(f"{values.dtype} can't hold {num_names} different codes; use float32 for inputs and weights")
    codes = values.round()
    return torch.where((codes >= 1) & (codes <= num_names), codes, 0).long()
