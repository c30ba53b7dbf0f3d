"""Snapshot: what one rank saves, and the CPU buffers that it is copied to while training waits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from stretto.base.errors import DivergedError
from stretto.checkpoint.manifest import RunInfo, TrainingState
from stretto.checkpoint.shards import TensorShard


@dataclass(frozen=True)
class Snapshot:
    """What one rank saves. It is safe to change the tensors once `CheckpointManager.save` has returned."""

    training_state: TrainingState
    shards: Sequence[TensorShard]
    run_info: RunInfo = field(default_factory=RunInfo)
    files: Mapping[str, bytes] = field(default_factory=dict)  # small files that the first rank writes, by name


class StagingBuffers:
    """Copies of a rank's tensors in CPU memory, reused from save to save."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}  # by name: a rank saves at most one shard of a tensor

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with copies of its tensors, valid until the next call."""
        staged = []
        for shard in snapshot.shards:
            tensor = shard.tensor.detach()
            buffer = self._buffers.get(shard.name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                is_pinned = tensor.device.type != "cpu"
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_pinned)
                self._buffers[shard.name] = buffer
            buffer.copy_(tensor, non_blocking=True)
            staged.append(replace(shard, tensor=buffer))
        # The copies are in the stream of the device that holds the tensor, which may not be torch's current device.
        for device in {shard.tensor.device for shard in snapshot.shards if shard.tensor.device.type != "cpu"}:
            torch.accelerator.current_stream(device).synchronize()
        return replace(snapshot, shards=staged)


def check_finite(snapshot: Snapshot) -> None:
    """Raise DivergedError if a floating-point tensor has values that are not finite."""
    for shard in snapshot.shards:
        tensor = shard.tensor
        # The sum is one fast pass. If it is not finite, check each element: the sum may just have overflowed.
        if tensor.is_floating_point() and not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
            raise DivergedError(
                f"{shard.name} has values that are not finite after step {snapshot.training_state.step}, so this step "
                "was not saved; lower train.lr and start again: the run resumes from the previous checkpoint"
            )
