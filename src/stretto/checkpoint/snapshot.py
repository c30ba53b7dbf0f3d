"""Snapshot: what is to be saved of one rank, and the memory into which it is copied while the run waits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from stretto.base.errors import DivergedError
from stretto.checkpoint.manifest import RunInfo, TrainingState
from stretto.checkpoint.shards import TensorShard


@dataclass(frozen=True)
class Snapshot:
    """What is to be saved of this rank, as it is now; its tensors may change once `save` has returned."""

    training_state: TrainingState
    shards: Sequence[TensorShard]
    run_info: RunInfo = field(default_factory=RunInfo)
    files: Mapping[str, bytes] = field(default_factory=dict)  # small ones, the same on all ranks


class StagingBuffers:
    """Memory for copies of a rank's tensors, kept from save to save."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with its tensors where nothing changes them until the next one is copied."""
        staged = []
        is_elsewhere = False
        for shard in snapshot.shards:
            tensor = shard.tensor.detach()
            buffer = self._buffers.get(shard.name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                is_pinned = tensor.device.type != "cpu"
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_pinned)
                self._buffers[shard.name] = buffer
            is_elsewhere = is_elsewhere or tensor.device.type != "cpu"
            buffer.copy_(tensor, non_blocking=True)
            staged.append(replace(shard, tensor=buffer))
        if is_elsewhere:
            torch.accelerator.synchronize()
        return replace(snapshot, shards=staged)


def check_finite(snapshot: Snapshot) -> None:
    """Refuse numbers that are not finite."""
    for shard in snapshot.shards:
        tensor = shard.tensor
        # A sum is finite if all its parts are; the other way round it may just be large.
        if tensor.is_floating_point() and not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
            raise DivergedError(
                f"{shard.name} holds numbers that are not finite after step {snapshot.training_state.step}, so no checkpoint "
                "was made of it; lower train.lr, and start again: the run goes on from the checkpoint before"
            )
