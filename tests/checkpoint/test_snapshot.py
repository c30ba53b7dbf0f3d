"""Copies of tensors for a save: complete when `copy` returns, whichever device holds the tensors."""

from typing import Self

import pytest
import torch
from torch import Tensor

from stretto.checkpoint.manifest import TrainingState
from stretto.checkpoint.shards import TensorShard
from stretto.checkpoint.snapshot import Snapshot, StagingBuffers

STATE = TrainingState(step=1, seed=1, optimizer="SGD", epoch=0, pool=0, index=0, progress=0.5)


class OnSecondGpu(Tensor):
    """A CPU tensor that says it is on `cuda:1`, while torch's current device is another."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)

    def detach(self) -> Self:
        return self


class Stream:
    def __init__(self, device: torch.device, waited: list[torch.device]) -> None:
        self._device, self._waited = device, waited

    def synchronize(self) -> None:
        self._waited.append(self._device)


def test_a_copy_waits_for_the_stream_of_the_device_that_holds_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream(device, waited))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: waited.append(torch.device("cuda", 0)))
    # Without a GPU, memory can't be pinned.
    monkeypatch.setattr(
        "stretto.checkpoint.snapshot.torch.empty", lambda shape, *, dtype, **_: torch.zeros(shape, dtype=dtype)
    )
    weight = torch.arange(4.0)
    shards = [TensorShard("weights.a", weight.as_subclass(OnSecondGpu)), TensorShard("weights.b", weight)]
    staged = StagingBuffers().copy(Snapshot(STATE, shards))
    assert waited == [torch.device("cuda", 1)]
    assert all(torch.equal(shard.tensor, weight) for shard in staged.shards)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_copy_from_another_than_the_current_gpu_is_complete() -> None:
    large = torch.rand(4096, 4096, device="cuda:1")
    for _ in range(20):
        large = large @ large / 4096
    # Its computation and its copy are queued on cuda:1, while cuda:0 is the current device.
    staged = StagingBuffers().copy(Snapshot(STATE, [TensorShard("weights.a", large)]))
    copied = staged.shards[0].tensor.clone()
    torch.cuda.synchronize(1)
    assert torch.equal(copied, large.cpu())
