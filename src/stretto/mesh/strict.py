"""The strict backend: NCCL's rules on the CPU, over gloo, to find on a laptop what would hang on GPUs.

Register it with `register_strict_backend`; `STRETTO_BACKEND=strict` makes all ranks use it. Its rules:

- A communicator (process group) runs its operations one after the other, in the order in which they were posted.
- Messages have no tags. A send ends only when its receive has started.
- Two ranks connect when they first send to each other on a communicator; the host waits for the other rank meanwhile.
- Nothing is complete until the host has waited for it: polling an operation never tells that it has ended.
- `synchronize`, like a device synchronization, waits for the operations of all communicators.
- An operation with a lost rank never ends and raises nothing; signal handlers don't run while the host waits for it.
- Only an abort, from another thread, ends what the host waits for; it then raises an error.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.mesh.c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceOptions,
    Store,
    Work,
    open_gloo,
)

STRICT = "strict"
_FOREVER = timedelta(days=365)
_MESSAGE_TAG, _READY_TAG, _CONNECT_TAG = 0, 1, 2


def register_strict_backend() -> None:
    """Make torch.distributed know the backend `strict`."""
    if STRICT not in dist.Backend.backend_list:
        dist.Backend.register_backend(STRICT, StrictProcessGroup, devices=["cpu"])


def is_strict() -> bool:
    """Return whether the ranks use the strict backend."""
    return dist.is_initialized() and dist.get_backend() == STRICT


def synchronize() -> None:
    """Wait for all operations of this rank, as a synchronization of its device would."""
    for group in StrictProcessGroup.groups:
        group.synchronize()


class StrictWork(Work):
    """An operation in a communicator's queue."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self.tensors = tensors
        self.was_awaited = False

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        # In C++: no signal handler runs, and Ctrl-C does nothing, until the operation has ended.
        self.future.wait()
        self.was_awaited = True
        return True

    def is_completed(self) -> bool:
        return self.was_awaited

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self.future


class StrictProcessGroup(dist.ProcessGroup):
    """One communicator: a queue of operations and the thread that runs them, as a stream would."""

    groups: list["StrictProcessGroup"] = []  # noqa: RUF012 - all communicators of this process
    ended: list["StrictProcessGroup"] = []  # noqa: RUF012 - those that were shut down

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo = open_gloo(store, rank, size, _FOREVER)
        self._queue: SimpleQueue[tuple[Callable[[], object], StrictWork] | None] = SimpleQueue()
        self._pending: set[StrictWork] = set()
        self._last: StrictWork | None = None
        self._connected: set[int] = set()
        StrictProcessGroup.groups.append(self)
        threading.Thread(target=self._run, daemon=True).start()

    def synchronize(self) -> None:
        """Wait for the operations posted so far."""
        if self._last is not None:
            self._last.wait()

    def abort(self) -> None:
        """End what the host waits for, with an error."""
        for work in list(self._pending):
            with suppress(RuntimeError):  # it has just ended
                work.future.set_exception(RuntimeError("the communicator was aborted"))  # type: ignore[arg-type]
        self.shutdown()

    def shutdown(self) -> None:
        """End the thread. The group is kept: gloo may end the process if its last reference goes on another thread."""
        self._queue.put(None)
        if self in StrictProcessGroup.groups:
            StrictProcessGroup.groups.remove(self)
            StrictProcessGroup.ended.append(self)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return STRICT

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> StrictWork:
        self._connect(peer, tag)

        def transfer() -> None:
            # The receive has started once this message is here.
            self._gloo.recv([torch.zeros(1)], peer, _READY_TAG).wait()
            self._gloo.send(tensors, peer, _MESSAGE_TAG).wait()

        return self._post(transfer, tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> StrictWork:
        self._connect(peer, tag)

        def transfer() -> None:
            self._gloo.send([torch.zeros(1)], peer, _READY_TAG).wait()
            self._gloo.recv(tensors, peer, _MESSAGE_TAG).wait()

        return self._post(transfer, tensors)

    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor], options: AllreduceOptions | None = None
    ) -> StrictWork:
        return self._post(lambda: self._gloo.allreduce(tensors, options or AllreduceOptions()).wait(), tensors)

    def broadcast(  # type: ignore[override]
        self, tensors: list[Tensor], options: BroadcastOptions
    ) -> StrictWork:
        return self._post(lambda: self._gloo.broadcast(tensors, options).wait(), tensors)

    def reduce(  # type: ignore[override]
        self, tensors: list[Tensor], options: ReduceOptions
    ) -> StrictWork:
        return self._post(lambda: self._gloo.reduce(tensors, options).wait(), tensors)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: AllgatherOptions | None = None
    ) -> StrictWork:
        options = options or AllgatherOptions()
        return self._post(lambda: self._gloo.allgather(outputs, inputs, options).wait(), outputs[0])

    def alltoall_base(  # type: ignore[override]
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        options: AllToAllOptions | None = None,
    ) -> StrictWork:
        return self._post(
            lambda: self._gloo.alltoall_base(
                output, input, output_sizes, input_sizes, options or AllToAllOptions()
            ).wait(),
            [output],
        )

    def barrier(self, options: BarrierOptions | None = None) -> StrictWork:  # type: ignore[override]
        return self._post(lambda: self._gloo.barrier(options or BarrierOptions()).wait(), [])

    def _connect(self, peer: int, tag: int) -> None:
        assert tag == 0, f"tag={tag}: NCCL has no tags"
        if peer not in self._connected:
            sent = self._gloo.send([torch.zeros(1)], peer, _CONNECT_TAG)
            self._gloo.recv([torch.zeros(1)], peer, _CONNECT_TAG).wait()
            sent.wait()
            self._connected.add(peer)

    def _post(self, run: Callable[[], object], tensors: list[Tensor]) -> StrictWork:
        work = StrictWork(tensors)
        self._last = work
        self._pending.add(work)
        self._queue.put((run, work))
        return work

    def _run(self) -> None:
        while (posted := self._queue.get()) is not None:
            run, work = posted
            try:
                run()
                self._pending.discard(work)
                work.future.set_result(work.tensors)
            except RuntimeError:
                # A rank is lost. On a GPU, the kernel would wait for it forever, and so would all that are queued.
                return
