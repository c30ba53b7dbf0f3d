"""Trees of tensors, as loaders and modules have them: tuples, lists and dicts in any depth."""

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def tensors_of(tree: Any) -> list[Tensor]:  # noqa: ANN401
    """Return all tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:  # noqa: ANN401
    """Return a tree with the results of a function in place of its tensors; all else is as it was."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, list | tuple):
        make = getattr(tree, "_make", type(tree))  # of named tuples
        return make(map_tensors(function, part) for part in tree)
    if isinstance(tree, MutableMapping):
        changed = copy.copy(tree)
        changed.update({key: map_tensors(function, part) for key, part in tree.items()})
        return changed
    return tree
