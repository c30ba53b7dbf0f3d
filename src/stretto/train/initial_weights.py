"""Initial weights from a file, instead of weights that are drawn by seed."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stretto.base.errors import DataError
from stretto.blocks.stack import Stack


def check_initial_weights(model: Stack, path: str) -> dict[str, str]:
    """Raise if a file doesn't fit a model; return the name in the file for each weight of the model.

    Blocks with weights are matched in order, so that models with and without dropout fit each other.
    """
    with _open(path) as file:
        shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dict
    model_shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    model_blocks, file_blocks = _block_indices(model_shapes, path), _block_indices(shapes, path)
    if len(model_blocks) != len(file_blocks):
        raise DataError(
            f"model.weights={path} has weights of {len(file_blocks)} blocks, but the model has {len(model_blocks)} "
            "blocks with weights; make the [model] section the same"
        )
    new_indices = dict(zip(model_blocks, file_blocks, strict=True))
    names = {}
    for name in model_shapes:
        _, index, rest = name.split(".", 2)
        file_name = f"blocks.{new_indices[int(index)]}.{rest}"
        names[name] = file_name
        if shapes.get(file_name) != model_shapes[name]:
            problem = f"has it as {shapes[file_name]}" if file_name in shapes else f"has no {file_name}"
            raise DataError(
                f"the model has a weight {name} of {model_shapes[name]}, but model.weights={path} {problem}; make the "
                "[model] section the same"
            )
    unused = sorted(set(shapes) - set(names.values()))
    if unused:
        raise DataError(
            f"model.weights={path} has a weight {unused[0]}, but the model has none; make the [model] section the same"
        )
    return names


def load_initial_weights(stage: Stack, model: Stack, path: str) -> None:
    """Load the weights of this rank's blocks from a file; the others are not read."""
    names = check_initial_weights(model, path)
    with _open(path) as file, torch.no_grad():
        for name, tensor in stage.state_dict().items():
            tensor.copy_(file.get_tensor(names[name]))


@contextmanager
def _open(path: str) -> Iterator[Any]:
    if not Path(path).is_file():
        raise DataError(f"model.weights={path} does not exist; choose a file that stretto.exchange.save_weights wrote")
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise DataError(
            f"model.weights={path} is not a safetensors file, or is damaged ({error}); write it again"
        ) from None


def _block_indices(names: Iterable[str], path: str) -> list[int]:
    """The indices of blocks with weights, in order."""
    indices = set()
    for name in names:
        blocks, _, rest = name.partition(".")
        index = rest.partition(".")[0]
        if blocks != "blocks" or not index.isdecimal():
            raise DataError(
                f"model.weights={path} has a weight {name}, which is not a name of a Stack; read it with "
                "stretto.exchange.from_torch and write that with stretto.exchange.save_weights"
            )
        indices.add(int(index))
    return sorted(indices)
