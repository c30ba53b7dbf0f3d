"""Saves and loads weights as safetensors files, by their names in the whole model."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from stretto.base.disk import atomic_path
from stretto.base.errors import DataError
from stretto.base.reason import last_line
from stretto.blocks.stack import Stack
from stretto.blocks.ties import load_tensors


def save_weights(weights: Stack | dict[str, Tensor], path: Path | str) -> None:
    """Write a stack's weights, or tensors by name, to a file atomically."""
    if isinstance(weights, Stack):
        weights.check_complete()
    tensors = weights.named_tensors() if isinstance(weights, Stack) else weights
    with atomic_path(Path(path)) as new_path:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, new_path)
        # safetensors creates files that only their owner can read; use the permissions of the folder instead.
        new_path.chmod(new_path.parent.stat().st_mode & 0o666)


def load_weights(stack: Stack, path: Path | str) -> None:
    """Load weights into a stack, which can be on the meta device; names and shapes must match."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path} does not exist; choose a file that a finished run or save_weights wrote")
    try:
        load_tensors(stack, load_file(path))
    except (SafetensorError, RuntimeError) as error:
        reason = last_line(error)  # torch's first line has only the class
        problem = f"{path} does not hold this model's weights ({reason})"
        raise DataError(f"{problem}; copy or write it again, or use the model that it was saved from") from None


def weight_names(path: Path | str) -> list[str]:
    """Return the names of the weights in a file; empty if it can't be read, which `load_weights` explains."""
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError):
        return []


def check_initial_weights(model: Stack, path: str) -> dict[str, str]:
    """Raise if a file doesn't fit a model; return the weights' names in the file, by their names in the model.

    Blocks with weights are matched in order, so that models with and without dropout fit each other.
    """
    with _open(path) as file:
        file_shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a dict
    model_shapes = {name: list(tensor.shape) for name, tensor in model.named_tensors().items()}
    model_blocks, file_blocks = _block_indices(model_shapes, path), _block_indices(file_shapes, path)
    if len(model_blocks) != len(file_blocks):
        raise DataError(
            f"the number of blocks with weights is {len(file_blocks)} in model.weights={path}, but {len(model_blocks)} "
            "in the model; change the [model] section to match"
        )
    file_indices = dict(zip(model_blocks, file_blocks, strict=True))
    file_names = {}
    for name in model_shapes:
        prefix, index, suffix = (*name.split(".", 2), "")[:3]
        # The names of the loss's weights don't depend on the blocks.
        file_name = name if prefix == "loss" else f"blocks.{file_indices[int(index)]}.{suffix}"
        file_names[name] = file_name
        if file_shapes.get(file_name) != model_shapes[name]:
            problem = f"has it as {file_shapes[file_name]}" if file_name in file_shapes else f"has no {file_name}"
            raise DataError(
                f"the model has a weight {name} of shape {model_shapes[name]}, but model.weights={path} {problem}; "
                "change the [model] section to match"
            )
    unused = sorted(set(file_shapes) - set(file_names.values()))
    if unused:
        raise DataError(
            f"model.weights={path} has a weight {unused[0]}, which the model lacks; change the [model] section to match"
        )
    return file_names


def load_initial_weights(stage: Stack, model: Stack, path: str) -> None:
    """Load the weights of this rank's blocks, `stage`, from a file with the whole model's weights."""
    file_names = check_initial_weights(model, path)
    with _open(path) as file, torch.no_grad():
        for name, tensor in stage.named_tensors().items():
            first, _ = stage.rows_of(name)
            values = file.get_tensor(file_names[name])
            tensor.copy_(values[first : first + len(tensor)] if tensor.dim() else values)


@contextmanager
def _open(path: str) -> Iterator[Any]:
    if not Path(path).is_file():
        raise DataError(f"model.weights={path} does not exist; choose a file that stretto.exchange.save_weights wrote")
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise DataError(f"model.weights={path} is not a valid safetensors file ({error}); write it again") from None


def _block_indices(names: Iterable[str], path: str) -> list[int]:
    """Return the sorted indices of the blocks that have these weights, named as in `blocks.<index>.<name>`.

    Weights of the loss, `loss.<name>`, are left out.
    """
    indices = set()
    for name in names:
        prefix, _, suffix = name.partition(".")
        if prefix == "loss":
            continue
        index = suffix.partition(".")[0]
        if prefix != "blocks" or not index.isdecimal():
            raise DataError(
                f"model.weights={path} has a weight {name}, but those of a Stack are named blocks.<index>.<name>; "
                "convert the file with stretto.exchange.from_torch, and write it with stretto.exchange.save_weights"
            )
        indices.add(int(index))
    return sorted(indices)
