"""The batch whose loss or gradient was not finite, saved for study."""

from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from stretto.train.trainer import Trainer


def save_nonfinite_batch(trainer: Trainer, path: Path) -> str:
    """Save this rank's share of the trainer's last window, and the state it started from; return a remark on where."""
    assert trainer.window is not None
    window = {name: value for name, value in asdict(trainer.window).items() if isinstance(value, Tensor)}
    state = {f"state.{index}": tensor for index, tensor in enumerate(trainer.state or ())}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Copies: safetensors refuses views that share memory.
        save_file({name: value.cpu().clone().contiguous() for name, value in {**window, **state}.items()}, path)
    except OSError as error:
        return f"the batch can't be saved in {path} ({error.strerror})"
    return f"the batch is in {path}"
