"""State: a tuple of tensors, each with the batch in dim 0; `()` for a stateless block."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.base.device_copy import to_device

State = tuple[Tensor, ...]


def detach(state: State) -> State:
    """Return the state without its graph: the next window starts from the values, but gradients stop here."""
    return tuple(tensor.detach() for tensor in state)


def slice_rows(state: State, rows: slice) -> State:
    """Return views of some rows of a state."""
    return tuple(tensor[rows] for tensor in state)


def cat_rows(states: Sequence[State]) -> State:
    """Concatenate states along the rows."""
    if len(states) == 1:
        return states[0]
    return tuple(torch.cat(tensors) for tensors in zip(*states, strict=True))


def where_rows(mask: Tensor, state: State, other: State) -> State:
    """Return `state` in the rows where `mask` (a boolean per row, on the CPU) is true, and `other` elsewhere."""
    if bool(mask.all()):
        return state
    if not bool(mask.any()):
        return other
    masks = {device: to_device(mask, device) for device in {tensor.device for tensor in state}}
    return tuple(
        torch.where(masks[tensor.device].view(-1, *[1] * (tensor.dim() - 1)), tensor, other_tensor)
        for tensor, other_tensor in zip(state, other, strict=True)
    )
