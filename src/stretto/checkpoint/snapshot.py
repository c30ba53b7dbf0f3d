"""Snapshot: what is to be saved of one rank, and the memory into which it is copied while the run waits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from stretto.base.errors import DivergedError
from stretto.checkpoint.manifest import About, Facts
from stretto.checkpoint.pieces import Piece


@dataclass(frozen=True)
class Snapshot:
    """What is to be saved of this rank, as it is now; its tensors may change once `save` has returned."""

    facts: Facts
    pieces: Sequence[Piece]
    about: About = field(default_factory=About)
    files: Mapping[str, bytes] = field(default_factory=dict)  # small ones, the same on all ranks


class Buffers:
    """Memory for copies of a rank's tensors, kept from save to save."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with its tensors where nothing changes them until the next one is copied."""
        staged = []
        is_elsewhere = False
        for piece in snapshot.pieces:
            tensor = piece.tensor.detach()
            buffer = self._kept.get(piece.name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                is_pinned = tensor.device.type != "cpu"
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_pinned)
                self._kept[piece.name] = buffer
            is_elsewhere = is_elsewhere or tensor.device.type != "cpu"
            buffer.copy_(tensor, non_blocking=True)
            staged.append(replace(piece, tensor=buffer))
        if is_elsewhere:
            torch.accelerator.synchronize()
        return replace(snapshot, pieces=staged)


def check_finite(snapshot: Snapshot) -> None:
    """Refuse numbers that are not finite."""
    for piece in snapshot.pieces:
        tensor = piece.tensor
        # A sum is finite if all its parts are; the other way round it may just be large.
        if tensor.is_floating_point() and not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
            raise DivergedError(
                f"{piece.name} holds numbers that are not finite after step {snapshot.facts.step}, so no checkpoint "
                "was made of it; lower train.lr, and start again: the run goes on from the checkpoint before"
            )
