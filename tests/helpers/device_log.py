"""Runs the real engine of one rank on the meta device, and logs what it would ask of a GPU and of NCCL.

The log of a rank is a list of events, in the order of the host's calls:

    send, receive, all_reduce    an operation of a communicator; the device runs it in a stream of its own
    wait                         the compute stream waits for such an operation
    kernel                       work for the compute stream; consecutive kernels are one event
    allocate                     a tensor is created without a kernel
    host_wait                    the host waits for the compute stream: it reads a tensor, or makes a blocking copy
    device_wait                  the host waits for everything on the device
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stretto.mesh.c10d import HashStore, Work
from stretto.mesh.world import World

META = torch.device("meta")


class Event(NamedTuple):
    """One call of the host."""

    kind: str
    group: str = ""  # of an operation: the name of its communicator
    ranks: tuple[int, ...] = ()  # of an operation: the ranks that take part
    number: int = -1  # of an operation, or of the operation that is waited for
    num_bytes: int = 0


@dataclass
class DeviceLog:
    """The events of one rank, and how many there were of each kind."""

    events: list[Event] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    num_operations: int = 0
    awaited_by_ddp: list[int] = field(
        default_factory=list
    )  # all-reduces that the running backward waits for at its end

    def add(self, kind: str, reason: str = "") -> None:
        self.counts[kind] += 1
        if reason:
            self.counts[f"{kind}: {reason}"] += 1
        if kind != "kernel" or not self.events or self.events[-1].kind != "kernel":
            self.events.append(Event(kind))


_log = DeviceLog()


class _LoggedWork(Work):
    def __init__(self, number: int, tensors: list[Tensor]) -> None:
        super().__init__()
        self.number, self.tensors = number, tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        _log.events.append(Event("wait", number=self.number))
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        # DDP waits for the futures of its buckets at the end of a backward.
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self.tensors)
        _log.awaited_by_ddp.append(self.number)
        return future


class _LoggingGroup(dist.ProcessGroup):
    """A communicator that moves no data: it only logs."""

    def __init__(self, options: Any, _: object = None) -> None:  # noqa: ANN401
        ranks = options.global_ranks_in_group or list(range(options.group_size))
        super().__init__(options.group_rank, len(ranks))  # type: ignore[call-arg]
        self.group, self.ranks = str(options.group_id), tuple(ranks)

    def getBackendName(self) -> str:  # noqa: N802
        return "logging"

    def _log(self, kind: str, ranks: tuple[int, ...], tensors: list[Tensor]) -> _LoggedWork:
        _log.num_operations += 1
        _log.counts[kind] += 1
        size = sum(tensor.nbytes for tensor in tensors)
        _log.events.append(Event(kind, self.group, ranks, _log.num_operations, size))
        return _LoggedWork(_log.num_operations, tensors)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> _LoggedWork:
        return self._log("send", (self.ranks[self.rank()], self.ranks[peer]), tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> _LoggedWork:
        return self._log("receive", (self.ranks[peer], self.ranks[self.rank()]), tensors)

    def allreduce(self, tensors: list[Tensor], options: object = None) -> _LoggedWork:  # type: ignore[override]
        return self._log("all_reduce", self.ranks, tensors)

    def broadcast(self, tensors: list[Tensor], options: object = None) -> _LoggedWork:  # type: ignore[override]
        return self._log("all_reduce", self.ranks, tensors)

    def reduce(self, tensors: list[Tensor], options: object = None) -> _LoggedWork:  # type: ignore[override]
        return self._log("all_reduce", self.ranks, tensors)

    def allgather(self, outputs: Any, inputs: list[Tensor], options: object = None) -> _LoggedWork:  # type: ignore[override]  # noqa: ANN401
        return self._log("all_reduce", self.ranks, inputs)


class _LoggedEvent:
    """An event in the compute stream; it has passed only if the host has waited for the stream since."""

    def __init__(self, *arguments: object, **options: object) -> None: ...

    def record(self) -> None:
        self.num_waits = _log.counts["host_wait"]

    def query(self) -> bool:
        return _log.counts["host_wait"] > self.num_waits

    def synchronize(self) -> None:
        if not self.query():
            _log.add("host_wait", "event")

    def elapsed_time(self, stop: object) -> float:
        return 0.0


class _KernelLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs what would be a kernel on a GPU, and where the host would wait for it."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        name = function.name().split("::")[1].split(".")[0]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [tensor.is_meta for tensor in tensors]
        if name == "_local_scalar_dense" and all(on_device):
            _log.add("host_wait", "item")
            return 1.0
        if name in ("_to_copy", "copy_"):
            source = tensors[-1]
            target = tensors[0].device if name == "copy_" else torch.device(kwargs.get("device") or source.device)
            if source.is_meta and target.type != "meta":
                _log.add("host_wait", "read")
                return (
                    tensors[0]
                    if name == "copy_"
                    else torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
                )
            if not source.is_meta and target.type == "meta":
                _log.counts["copy to device"] += 1
                is_asynchronous = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
                if not is_asynchronous:
                    _log.add("host_wait", "blocking copy")
        if any(on_device) or torch.device(kwargs.get("device") or "cpu").type == "meta":
            is_view = any(result.alias_info and not result.alias_info.is_write for result in function._schema.returns)
            if name in ("empty", "empty_like", "new_empty"):
                _log.events.append(Event("allocate"))
            elif not is_view and name not in ("detach", "_unsafe_view"):
                _log.add("kernel", name)
        return function(*args, **kwargs)


_original_backward = torch.autograd.backward


def _backward(*arguments: Any, **options: Any) -> None:  # noqa: ANN401
    """Run a backward; at its end, the compute stream waits for the all-reduces that DDP has started in it."""
    _original_backward(*arguments, **options)
    _log.events += [Event("wait", number=number) for number in _log.awaited_by_ddp]
    _log.awaited_by_ddp.clear()


@contextmanager
def logged_rank(rank: int, size: int) -> Iterator[tuple[World, DeviceLog]]:
    """Yield a world of `size` ranks on the meta device, seen from one of them, and the log of what it does."""
    global _log
    if "logging" not in dist.Backend.backend_list:
        dist.Backend.register_backend("logging", _LoggingGroup, extended_api=True, devices=["cpu", "meta"])
    _log = DeviceLog()
    dist.init_process_group("logging", rank=rank, world_size=size, store=HashStore())
    try:
        with pytest.MonkeyPatch.context() as patch, _KernelLog():  # type: ignore[no-untyped-call]
            patch.setattr(torch.accelerator, "synchronize", lambda *_: _log.add("device_wait"))
            patch.setattr(torch, "Event", _LoggedEvent)
            patch.setattr(torch.autograd, "backward", _backward)
            yield World(rank, size, META), _log
    finally:
        dist.destroy_process_group()
