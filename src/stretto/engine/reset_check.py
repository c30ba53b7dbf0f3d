"""check_resets: which models can start again within a window."""

from collections.abc import Callable

import torch

from stretto.base.errors import ConfigError, DataError
from stretto.base.window import Window
from stretto.engine.engine import Engine


def check_resets(engine: Engine, window: Window, find_obstacle: Callable[[], str | None] = lambda: None) -> None:
    """Raise if a window has resets and they, the model, or an obstacle don't allow it; every rank raises alike."""
    if window.resets is None:
        return
    shape = (window.num_steps, window.num_rows)
    if window.resets.dtype != torch.bool or tuple(window.resets.shape) != shape or window.resets.device.type != "cpu":
        raise DataError(
            f"Window.resets is {window.resets.dtype} {tuple(window.resets.shape)} on {window.resets.device}; "
            f"use a bool tensor {shape} (time, batch) on the CPU"
        )
    reason: str | None
    if not engine.is_causal:
        reason = "has a block that looks ahead in time"
    elif engine.stride > 1:
        reason = f"has strided blocks (stride {engine.stride})"
    elif engine.row_loss is not None:
        reason = f"is trained with {type(engine.row_loss).__name__}, a loss over whole rows"
    else:
        reason = find_obstacle()
    if reason is not None:
        raise ConfigError(f"the window has resets, but the model {reason}; make each episode a row of its own")
