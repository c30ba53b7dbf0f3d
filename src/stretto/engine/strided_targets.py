"""stride_targets: the targets of models whose blocks make one time step of several."""

from dataclasses import replace

import torch
from torch import Tensor

from stretto.base.errors import DataError
from stretto.base.window import IGNORE_INDEX, Window


def stride_targets(targets: Tensor, num_steps: int, stride: int) -> Tensor:
    """Return targets at the time steps of a model's outputs, from those at the time steps of its inputs.

    Each output can have one target: that of a row, which is at its last time step, or of one of the output's `stride`
    time steps. Targets that are at the outputs already stay as they are.
    """
    num_outputs = -(-num_steps // stride)
    if len(targets) == num_outputs:
        return targets
    if len(targets) != num_steps:
        raise DataError(
            f"targets have {len(targets)} time steps, but inputs have {num_steps} and, with a stride of {stride}, "
            f"outputs {num_outputs}; give a target for each output"
        )
    missing = torch.nan if targets.is_floating_point() else IGNORE_INDEX
    padding = targets.new_full((num_outputs * stride - num_steps, *targets.shape[1:]), missing)
    groups = torch.cat([targets, padding]).view(num_outputs, stride, *targets.shape[1:])
    is_target = ~groups.isnan() if targets.is_floating_point() else groups != IGNORE_INDEX
    if bool((is_target.sum(1) > 1).any()):
        raise DataError(
            f"several of {stride} time steps have a target, but the model makes one output of them; give "
            f"{num_outputs} targets for {num_steps} time steps, or one per row"
        )
    # Without a target, any of the group's will do: all are missing.
    return groups.gather(1, is_target.int().argmax(1, keepdim=True)).squeeze(1)


def stride_window(window: Window, stride: int) -> Window:
    """Return a window with targets at the model's outputs."""
    if window.targets is None:
        return window
    return replace(window, targets=stride_targets(window.targets, window.num_steps, stride))
