"""Runs one rank's real code on the meta device, and logs what it would ask of a GPU and of NCCL.

The log of a rank is a list of events, in the order of the host's calls:

    send, receive, all_reduce    an operation of a communicator; the device runs it in a stream of its own
    batch                        sends and receives in one operation; an all-to-all is one, too
    wait                         the compute stream waits for such an operation
    kernel                       work for the compute stream; consecutive kernels are one event
    allocate                     a tensor is created without a kernel
    host_wait                    the host waits for the compute stream: it reads a tensor, or makes a blocking copy
    device_wait                  the host waits for everything on the device
    meet                         the hosts of some ranks wait for each other

An operation that torch's caller waits for (`async_op=False`) runs in the compute stream, as under torch 2.10 and later.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda._sanitizer import zip_arguments
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stretto.base import device_copy
from stretto.mesh.c10d import AllgatherOptions, BroadcastOptions, HashStore, Store, Work, open_gloo
from stretto.mesh.world import World

META = torch.device("meta")


COMPUTE = "compute"  # the name of the stream


class Part(NamedTuple):
    """A message of a batch."""

    kind: str  # send or receive
    peer: int
    num_bytes: int


class Event(NamedTuple):
    """One call of the host."""

    kind: str
    group: str = ""  # of an operation: the name of its communicator
    ranks: tuple[int, ...] = ()  # of an operation: the ranks that take part
    number: int = -1  # of an operation, or of the operation that is waited for
    num_bytes: int = 0
    parts: tuple[Part, ...] = ()  # of a batch
    is_sync: bool = False  # an operation in the compute stream

    @property
    def stream(self) -> str:
        return self.group if self.ranks and not self.is_sync else COMPUTE

    @property
    def messages(self) -> tuple[Part, ...]:
        """Return the messages of a batch, or the one of a send or receive."""
        if self.kind not in ("send", "receive"):
            return self.parts
        return (Part(self.kind, self.ranks[self.kind == "send"], self.num_bytes),)


class Access(NamedTuple):
    """What a kernel or an operation reads and writes: the addresses of storages. Or a wait for an operation."""

    name: str
    event: Event
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()


@dataclass
class DeviceLog:
    """The events of one rank, and how many there were of each kind."""

    events: list[Event] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    num_operations: int = 0
    awaited_by_ddp: list[int] = field(
        default_factory=list
    )  # all-reduces that the running backward waits for at its end
    pinned: set[int] = field(default_factory=set)  # storages of the host
    kept: list[Any] = field(default_factory=list)  # storages: an address stands for one of them
    values: dict[int, Tensor] = field(default_factory=dict)  # that were copied into a storage of the device
    has_peers: bool = False  # whether the other ranks run, too, and what is on the host is real

    def add(self, kind: str, reason: str = "") -> None:
        self.counts[kind] += 1
        if reason:
            self.counts[f"{kind}: {reason}"] += 1
        if kind != "kernel" or not self.events or self.events[-1].kind != "kernel":
            self.events.append(Event(kind))

    def meet(self, group: str, ranks: Sequence[int]) -> None:
        """The hosts of a group wait for each other."""
        self.counts[f"meetings of {group}"] += 1
        self.events.append(Event("meet", f"{group} {self.counts[f'meetings of {group}']}", tuple(ranks)))

    def wait(self, number: int) -> None:
        """The compute stream waits for an operation."""
        self.events.append(Event("wait", number=number))
        self.accesses.append(Access("wait", self.events[-1]))

    def access(self, name: str, event: Event, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        if self.has_peers:
            self.accesses.append(Access(name, event, self.addresses(reads), self.addresses(writes)))

    def addresses(self, tensors: Sequence[Tensor]) -> frozenset[int]:
        storages = [tensor.untyped_storage() for tensor in tensors]
        self.kept += storages
        return frozenset(storage._cdata for storage in storages)


_log = DeviceLog()


class LoggedWork(Work):
    def __init__(self, number: int, tensors: list[Tensor]) -> None:
        super().__init__()
        self.number, self.tensors = number, tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        _log.wait(self.number)
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        # DDP waits for the futures of its buckets at the end of a backward.
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self.tensors)
        _log.awaited_by_ddp.append(self.number)
        return future


class _LoggingGroup(dist.ProcessGroup):
    """A communicator that only logs; between ranks that all run, it moves what is on the host."""

    def __init__(self, options: Any, _: object = None) -> None:  # noqa: ANN401
        ranks = options.global_ranks_in_group or list(range(options.group_size))
        super().__init__(options.group_rank, len(ranks))  # type: ignore[call-arg]
        self.group, self.ranks = str(options.group_id), tuple(ranks)
        if _log.has_peers:
            self._gloo = open_gloo(options.store, options.group_rank, len(ranks), options.timeout)

    def getBackendName(self) -> str:  # noqa: N802
        return "logging"

    def _log(
        self,
        kind: str,
        ranks: tuple[int, ...],
        reads: list[Tensor],
        writes: list[Tensor],
        parts: tuple[Part, ...] = (),
        *,
        is_sync: bool = False,
    ) -> LoggedWork:
        _log.num_operations += 1
        _log.counts[kind] += 1
        size = 0 if parts else sum(tensor.nbytes for tensor in reads or writes)
        event = Event(kind, self.group, ranks, _log.num_operations, size, parts, is_sync)
        _log.events.append(event)
        _log.access(kind, event, reads, writes)
        return LoggedWork(_log.num_operations, writes)

    def _collective(self, reads: list[Tensor], writes: list[Tensor], options: Any) -> LoggedWork:  # noqa: ANN401
        return self._log("all_reduce", self.ranks, reads, writes, is_sync=not getattr(options, "asyncOp", True))

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> LoggedWork:
        return self._log("send", (self.ranks[self.rank()], self.ranks[peer]), tensors, [])

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> LoggedWork:
        return self._log("receive", (self.ranks[peer], self.ranks[self.rank()]), [], tensors)

    def batch(self, ops: Sequence[dist.P2POp]) -> LoggedWork:
        """Send and receive in one operation."""
        kinds = ["send" if op.op is dist.isend else "receive" for op in ops]
        peers = [self.ranks[op.group_peer] for op in ops]
        parts = tuple(Part(kind, peer, op.tensor.nbytes) for kind, peer, op in zip(kinds, peers, ops, strict=True))
        sent, received = ([op.tensor for op, kind in zip(ops, kinds, strict=True) if kind == each] for each in _KINDS)
        return self._log("batch", self.ranks, sent, received, parts)

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        options: Any = None,  # noqa: ANN401
    ) -> LoggedWork:
        sizes = [("send", *each) for each in zip(self.ranks, input_sizes, strict=True)]
        sizes += [("receive", *each) for each in zip(self.ranks, output_sizes, strict=True)]
        own = self.ranks[self.rank()]
        parts = [Part(kind, peer, size * input.itemsize) for kind, peer, size in sizes if size and peer != own]
        is_sync = not getattr(options, "asyncOp", True)
        return self._log("batch", self.ranks, [input], [output], tuple(parts), is_sync=is_sync)

    def allreduce(self, tensors: list[Tensor], options: object = None) -> LoggedWork:  # type: ignore[override]
        return self._collective(tensors, tensors, options)

    def broadcast(self, tensors: list[Tensor], options: object = None) -> LoggedWork:  # type: ignore[override]
        for tensor in tensors:  # DDP's: all ranks make the buckets that rank 0 has chosen
            if (values := _log.values.get(tensor.untyped_storage()._cdata)) is not None:
                self._gloo.broadcast([values], BroadcastOptions()).wait()
        return self._collective(tensors, tensors, options)

    def reduce(self, tensors: list[Tensor], options: object = None) -> LoggedWork:  # type: ignore[override]
        return self._collective(tensors, tensors, options)

    def allgather(self, outputs: Any, inputs: list[Tensor], options: Any = None) -> Work:  # type: ignore[override]  # noqa: ANN401
        if _log.has_peers and not inputs[0].is_meta:
            _log.meet(self.group, self.ranks)
            return self._gloo.allgather(outputs, inputs, options or AllgatherOptions())
        return self._collective(inputs, outputs[0], options)


_KINDS = ("send", "receive")


def _batch_isend_irecv(ops: list[dist.P2POp]) -> list[Work]:
    """As with NCCL: one work for all."""
    group = ops[0].group
    assert isinstance(group, _LoggingGroup)
    return [group.batch(ops)]


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
                if (values := _log.values.get(source.untyped_storage()._cdata)) is not None:
                    return tensors[0].copy_(values)
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
                elif source.untyped_storage().data_ptr() not in _log.pinned:
                    _log.add("host_wait", "copy of pageable memory")
        result = function(*args, **kwargs)
        if name == "copy_" and tensors[0].is_meta and not tensors[-1].is_meta and _log.has_peers:
            _log.values |= dict.fromkeys(_log.addresses(tensors[:1]), tensors[-1].clone())
        if any(on_device) or torch.device(kwargs.get("device") or "cpu").type == "meta":
            is_view = any(result.alias_info and not result.alias_info.is_write for result in function._schema.returns)
            if name in ("empty", "empty_like", "new_empty"):
                _log.events.append(Event("allocate"))
            elif not is_view and name not in ("detach", "_unsafe_view", "set_"):
                _log.add("kernel", name)
                if _log.has_peers:
                    _log.access(name, Event("kernel"), *_reads_and_writes(function._schema, args, kwargs, result))
        return result


def _reads_and_writes(schema: Any, args: Any, kwargs: Any, result: Any) -> tuple[list[Tensor], list[Tensor]]:  # noqa: ANN401
    """Return what an operator of torch reads and writes on the device."""
    arguments = [(argument.alias_info, value) for argument, value in zip_arguments(schema, args, kwargs)]
    results = [result] if len(schema.returns) == 1 else result or ()
    returned = [(each.alias_info, value) for each, value in zip(schema.returns, results, strict=True)]
    reads = [value for alias, value in arguments if alias is None]
    writes = [value for alias, value in arguments if alias is not None and alias.is_write]
    writes += [value for alias, value in returned if alias is None]
    on_device = [
        [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_meta]
        for values in (reads, writes)
    ]
    return on_device[0], on_device[1]


_original_backward = torch.autograd.backward


def _backward(*arguments: Any, **options: Any) -> None:  # noqa: ANN401
    """Run a backward; at its end, the compute stream waits for the all-reduces that DDP has started in it."""
    _original_backward(*arguments, **options)
    for number in _log.awaited_by_ddp:
        _log.wait(number)
    _log.awaited_by_ddp.clear()


_is_autocast_enabled, _original_autocast = torch.is_autocast_enabled, torch.autocast


def _autocast(device: str, *arguments: Any, **options: Any) -> torch.autocast:  # noqa: ANN401
    """Autocast does not know the meta device."""
    return _original_autocast("cpu" if device == "meta" else device, *arguments, **options)


def _pin_memory(tensor: Tensor) -> Tensor:
    pinned = tensor.clone()
    _log.kept.append(pinned.untyped_storage())
    _log.pinned.add(pinned.untyped_storage().data_ptr())
    return pinned


@contextmanager
def logged_rank(rank: int, size: int, store: Store | None = None) -> Iterator[tuple[World, DeviceLog]]:
    """Yield a world of `size` ranks on the meta device, seen from one of them, and the log of what it does.

    With a store, all ranks run this, and what they exchange on the host is real.
    """
    global _log
    if "logging" not in dist.Backend.backend_list:
        dist.Backend.register_backend("logging", _LoggingGroup, extended_api=True, devices=["cpu", "meta"])
    _log = DeviceLog(has_peers=store is not None)
    dist.init_process_group("logging", rank=rank, world_size=size, store=HashStore() if store is None else store)
    try:
        with pytest.MonkeyPatch.context() as patch, _KernelLog():  # type: ignore[no-untyped-call]
            patch.setattr(torch.accelerator, "synchronize", lambda *_: _log.add("device_wait"))
            patch.setattr(torch, "Event", _LoggedEvent)
            patch.setattr(
                torch, "is_autocast_enabled", lambda device: device != "meta" and _is_autocast_enabled(device)
            )
            patch.setattr(torch, "autocast", _autocast)
            patch.setattr(torch.autograd, "backward", _backward)
            patch.setattr(Tensor, "pin_memory", _pin_memory)
            patch.setattr(device_copy, "_WITHOUT_QUEUE", ("cpu",))  # meta stands for a GPU
            patch.setattr(dist, "batch_isend_irecv", _batch_isend_irecv)
            yield World(rank, size, META), _log
    finally:
        dist.destroy_process_group()
