"""Training steps of a module with regions under DistributedDataParallel, on the meta device of `device_log`.

All ranks run, so what they exchange on the host is real; what they would do on their GPUs is only logged.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence

from helpers.device_log import META, DeviceLog, logged_rank
from stretto import World, global_mean, parallelize
from stretto.mesh.c10d import PrefixStore, Store
from stretto.parallel import Layout
from stretto.parallel.guard import Guard
from stretto.parallel.module import regions_of

Change = Callable[[pytest.MonkeyPatch], None]
STEPS, WIDTH = 8, 4
LENGTHS = ((8, 4, 1), (7, 7), (), (8,))  # of the rows of each rank


class Model(nn.Module):
    """A region in stages, one in spans, and weights outside of both."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.causal = nn.LSTM(WIDTH, WIDTH, 4)
        self.both_ways = nn.RNN(WIDTH, WIDTH, 2, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, data: Tensor, batch_sizes: Tensor | None) -> Tensor:
        """Take rows of one length [time, rows, width], or packed ones with their batch sizes."""
        x = self.embedding(data)
        if batch_sizes is None:
            y, (h, _) = self.run_causal(x)
            return self.head(self.both_ways(y, h)[0])  # type: ignore[no-any-return]
        y, _ = self.run_causal(PackedSequence(x, batch_sizes))
        return self.head(self.both_ways(y)[0].data)  # type: ignore[no-any-return]

    def run_causal(self, x: Any) -> Any:  # noqa: ANN401
        return self.causal(x)


def make_inputs(rank: int, *, is_packed: bool) -> tuple[Tensor, Tensor | None]:
    lengths = torch.tensor(LENGTHS[rank], dtype=torch.int64)
    if not is_packed:
        return torch.zeros(STEPS, len(lengths), WIDTH, device=META), None
    sizes = (lengths > torch.arange(STEPS)[:, None]).sum(1)
    return torch.zeros(int(lengths.sum()), WIDTH, device=META), sizes[sizes > 0]


_stores: list[Store] = []


def log_steps(
    world: World, layout: Layout, changes: Sequence[Change] = (), *, is_packed: bool = False, model: type[Model] = Model
) -> tuple[DeviceLog, Counter[str]]:
    """Take three steps; return the log of this rank, and the counts of the third step alone.

    In the second step, DDP makes its buckets anew, once and for all, and the host waits for that.
    """
    if dist.is_initialized():
        _stores[:] = [_get_default_store()]
        dist.destroy_process_group()
    _stores.append(PrefixStore(f"log {len(_stores)}", _stores[0]))
    with pytest.MonkeyPatch.context() as patch, logged_rank(world.rank, world.size, _stores[-1]) as (_, log):
        gather = Guard._gather

        def gather_and_log(self: Guard, *arguments: Any) -> Any:  # noqa: ANN401
            log.meet("guard", self._ranks)
            return gather(self, *arguments)

        patch.setattr(Guard, "_gather", gather_and_log)
        for change in changes:
            change(patch)
        with META:
            module = parallelize(model(), layout)
        # Many buckets. Gradients stay in them, so DDP waits for them at the end of the backward.
        ddp = DistributedDataParallel(module, bucket_cap_mb=1e-4, init_sync=False, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        inputs = make_inputs(world.rank, is_packed=is_packed)
        for _ in range(3):
            before = log.counts.copy()
            optimizer.zero_grad()
            y = ddp(*inputs)
            global_mean(y.square().sum(), len(y)).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    assert all(region.has_shared for region in regions_of(module).values())
    return log, log.counts - before
