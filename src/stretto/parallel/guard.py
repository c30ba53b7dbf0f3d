"""Guard: before each call of a region and before each backward, the ranks of a group compare what they are about to do.

Without it, ranks that call different regions, or of which one skips a backward, would wait for each other forever, or
under NCCL pair messages of the same size wrongly, without a word. The comparison also carries what a region needs to
know of the other ranks: their rows, their longest row, their seeds. It goes over gloo on the host, so
that the host never waits for a device. It is sent pairwise: a collective that times out does not name who is missing.
"""

import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.base.errors import MeshError

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
REMEDY = (
    "every rank has to call the same regions in the same order, and one backward for each call: skip a step on all "
    "ranks or on none, use drop_last=True so that epochs end together, and evaluate with model.eval()"
)


@dataclass(frozen=True)
class Call:
    """What a rank is about to do. The first six fields, and the layouts, must be alike on all ranks."""

    region: int  # index in the guard's names
    number: int  # of the call of this region
    is_backward: bool
    dtype: int  # index in DTYPES
    width: int
    has_grad: bool = True  # whether gradients are recorded; without, there is no backward
    layouts: int = 0  # a checksum of those that may be chosen
    num_rows: int = 0
    num_steps: int = 0  # of all rows
    longest: int = 0  # steps
    is_dense: bool = True  # whether all rows have `longest` steps; else their lengths are gathered
    num_resets: int = 0
    has_state: bool = False  # whether the call has an initial state
    needs_grad: bool = True
    is_refused: bool = False  # whether this rank's input is refused; it raises its own error
    seed: int = 0  # of dropout for the rows of this rank
    optimizer_steps: int = 0  # that this rank has taken
    timed_steps: int = 0  # those of which it knows the time

    @classmethod
    def read(cls, values: Sequence[int]) -> "Call":
        """Return the call of another rank from its fields as integers."""
        return cls(**{field.name: field.type(value) for field, value in zip(fields(cls), values, strict=True)})  # type: ignore[operator]

    @property
    def key(self) -> tuple[int, ...]:
        return (self.region, self.number, self.is_backward, self.dtype, self.width, self.has_grad)


class Guard:
    """The comparison of calls in a group of ranks."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta, names: list[str]) -> None:
        self.group, self._timeout = group, timeout
        self._names = names  # of regions; it may grow
        self._ranks = dist.get_process_group_ranks(group)
        self._own = group.rank()
        self._numbers: dict[int, int] = {}  # calls of each region so far

    def next_number(self, region: int) -> int:
        """Return the number of the next call of a region."""
        self._numbers[region] = self._numbers.get(region, 0) + 1
        return self._numbers[region]

    def compare(self, call: Call) -> list[Call]:
        """Return what every rank is about to do; raise MeshError on all ranks if that is not the same."""
        own = torch.tensor([int(value) for value in astuple(call)])
        calls = [Call.read(values) for values in self._gather(own, [len(own)] * len(self._ranks), call)]
        refusing = [rank for rank, other in zip(self._ranks, calls, strict=True) if other.is_refused]
        if call.is_refused:
            return calls
        if refusing:
            name = self._names[calls[self._ranks.index(refusing[0])].region]
            raise MeshError(f"{_name(refusing)} refused the input of {name}: its own message says why")
        if len({other.key for other in calls}) > 1:
            ranks_by_key: dict[tuple[int, ...], list[int]] = {}
            for rank, other in zip(self._ranks, calls, strict=True):
                ranks_by_key.setdefault(other.key, []).append(rank)
            described = {calls[self._ranks.index(ranks[0])]: ranks for ranks in ranks_by_key.values()}
            told = "; ".join(f"{_name(ranks)} {self._describe(other)}" for other, ranks in described.items())
            raise MeshError(f"ranks do different things: {told}; {REMEDY}")
        if len({other.layouts for other in calls}) > 1:
            name = self._names[call.region]
            raise MeshError(f"ranks have different layouts for {name}; give parallelize() the same one on all ranks")
        return calls

    def gather_tensors(self, own: Tensor, sizes: Sequence[int], calls: Sequence[Call]) -> list[Tensor]:
        """Return a vector of every rank, of these sizes."""
        received = self._gather(own, sizes, calls[self._own])
        return [torch.tensor(values, dtype=torch.int64) for values in received]

    def gather(self, values: Sequence[int], call: Call) -> list[list[int]]:
        """Return integers of every rank, which has as many as this one."""
        return self._gather(torch.tensor(values), [len(values)] * len(self._ranks), call)

    def _gather(self, own: Tensor, sizes: Sequence[int], call: Call) -> list[list[int]]:
        """Return a vector of every rank."""
        boxes = [own if rank == self._own else own.new_empty(size) for rank, size in enumerate(sizes)]
        others = [rank for rank in range(len(sizes)) if rank != self._own]
        started, missing, sends, takes = time.monotonic(), [], [], []
        for rank in others:
            try:
                sends += [dist.isend(own, group=self.group, group_dst=rank)] if len(own) else []
                takes += [(rank, dist.irecv(boxes[rank], group=self.group, group_src=rank))] if sizes[rank] else []
            except RuntimeError:  # its connection is closed
                missing.append(self._ranks[rank])
        for rank, work in takes:
            left = self._timeout - timedelta(seconds=time.monotonic() - started)
            try:
                assert work is not None
                work.wait(max(left, timedelta(milliseconds=1)))
            except RuntimeError:
                missing.append(self._ranks[rank])
        if missing:
            seconds = f"{time.monotonic() - started:.0f} s"
            raise MeshError(
                f"rank {self._ranks[self._own]} {self._describe(call)}, but {_name(missing)} did not come within "
                f"{seconds}: it has ended, is slow, or is not in this call; {REMEDY}"
            )
        for send in sends:
            assert send is not None
            send.wait()
        return [box.tolist() for box in boxes]

    def _describe(self, call: Call) -> str:
        name = self._names[call.region] if call.region < len(self._names) else f"region {call.region}"
        facts = [str(DTYPES[call.dtype])[6:], f"width {call.width}"] + ["without gradients"] * (not call.has_grad)
        what = "the backward of call" if call.is_backward else "call"
        return f"is at {what} {call.number} of {name} ({', '.join(facts)})"


def _name(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
