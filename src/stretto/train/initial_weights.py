"""Start: the weights that a run begins with, where they aren't drawn by seed."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stretto.base.errors import DataError
from stretto.blocks.stack import Stack


def check_initial_weights(model: Stack, path: str) -> dict[str, str]:
    """Refuse a file that doesn't hold a model's weights; return the name that each weight of the model has in it.

    Blocks with weights are matched in order, so that a dropout more or less is no other model.
    """
    with _opened(path) as opened:
        shapes = {name: list(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 - no dict
    wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    here, there = _indices(wanted, path), _indices(shapes, path)
    if len(here) != len(there):
        raise DataError(
            f"model.weights={path} has weights of {len(there)} blocks, but the model has {len(here)} with weights; "
            "make the [model] section the same"
        )
    place = dict(zip(here, there, strict=True))
    names = {name: _renumbered(name, place) for name in wanted}
    for name, own in names.items():
        if shapes.get(own) != wanted[name]:
            found = f"has it as {shapes[own]}" if own in shapes else f"has no {own}"
            raise DataError(
                f"the model has a weight {name} of {wanted[name]}, but model.weights={path} {found}; make the [model] "
                "section the same"
            )
    unused = sorted(set(shapes) - set(names.values()))
    if unused:
        raise DataError(
            f"model.weights={path} has a weight {unused[0]}, but the model has none; make the [model] section the same"
        )
    return names


def load_initial_weights(stage: Stack, model: Stack, path: str) -> None:
    """Put the weights of a file into the blocks that this rank holds; the others are not read."""
    names = check_initial_weights(model, path)
    with _opened(path) as opened, torch.no_grad():
        for name, tensor in stage.state_dict().items():
            tensor.copy_(opened.get_tensor(names[name]))


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    if not Path(path).is_file():
        raise DataError(f"model.weights={path} does not exist; give a file that stretto.exchange.save_weights wrote")
    try:
        with safe_open(path, "pt") as opened:
            yield opened
    except SafetensorError as error:
        raise DataError(f"model.weights={path} is not safetensors, or is broken ({error}); write it again") from None


def _indices(names: Iterable[str], path: str) -> list[int]:
    """The absolute indices of blocks with weights, in order."""
    found = set()
    for name in names:
        blocks, _, rest = name.partition(".")
        index = rest.partition(".")[0]
        if blocks != "blocks" or not index.isdecimal():
            raise DataError(
                f"model.weights={path} has a weight {name}, which is no name of a stack's; read it with "
                "stretto.exchange.from_torch and write that with stretto.exchange.save_weights"
            )
        found.add(int(index))
    return sorted(found)


def _renumbered(name: str, place: dict[int, int]) -> str:
    blocks, index, rest = name.split(".", 2)
    return f"{blocks}.{place[int(index)]}.{rest}"
