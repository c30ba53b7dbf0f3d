"""Weights in and out of files: safetensors, by absolute names, whole or not at all."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stretto.base.errors import DataError
from stretto.blocks.stack import Stack


def save_weights(weights: Stack | dict[str, Tensor], path: Path | str) -> None:
    """Write a stack's weights, or tensors by name."""
    path = Path(path)
    named = weights.state_dict() if isinstance(weights, Stack) else weights
    partial = path.with_name(path.name + ".partial")
    save_file({name: tensor.contiguous() for name, tensor in named.items()}, partial)
    # safetensors makes a file for its owner alone; this one is as public as the folder it is in.
    partial.chmod(path.parent.stat().st_mode & 0o666)
    partial.rename(path)


def load_weights(stack: Stack, path: Path | str) -> None:
    """Read weights into a stack, which may be on the meta device; names and shapes must be its own."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path} does not exist; the run has not finished")
    try:
        stack.load_state_dict(load_file(path), assign=True)
    except (SafetensorError, RuntimeError) as error:
        first = str(error).strip().splitlines()[-1].strip()
        raise DataError(f"{path} does not hold this model's weights ({first}); train again") from None
