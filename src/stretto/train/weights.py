"""Weights in safetensors files, by their names in the whole model."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stretto.base.disk import atomic_path
from stretto.base.errors import DataError
from stretto.blocks.stack import Stack


def save_weights(weights: Stack | dict[str, Tensor], path: Path | str) -> None:
    """Write a stack's weights, or tensors by name, completely or not at all."""
    named = weights.state_dict() if isinstance(weights, Stack) else weights
    with atomic_path(Path(path)) as partial:
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, partial)
        # safetensors creates files that only their owner can read; this one gets the permissions of its folder.
        partial.chmod(partial.parent.stat().st_mode & 0o666)


def load_weights(stack: Stack, path: Path | str) -> None:
    """Load weights into a stack, which may be on the meta device; names and shapes must match."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path} does not exist; the run has not finished")
    try:
        stack.load_state_dict(load_file(path), assign=True)
    except (SafetensorError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise DataError(f"{path} does not hold this model's weights ({reason}); train again") from None
