"""Channel: messages in one direction between neighboring stages.

Sends are asynchronous, so that messages travel while the stage computes. With gloo, receives are posted ahead too.

With NCCL a posted receive is a kernel that stays on the GPU until its message arrives. Posted ahead, it would wait for
a message whose sender may be waiting for this rank's next kernels, which may not start before the receive has ended. So
with any backend but gloo, a receive is posted when the stage needs its message, or when the caller knows that it is on
its way. Its buffer exists by then: to allocate memory, CUDA may wait for the message that was just sent, whose receiver
may wait for a message too.
"""

from collections import deque
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.mesh.liveness import WAITING
from stretto.mesh.world import World

MAX_PENDING = 2
"""How many receives are posted ahead of the one that the stage works on, with gloo; how many sends are left pending."""

Endpoint = tuple[dist.ProcessGroup, int | None]
"""The process group for one direction to or from a neighbor, and the neighbor's rank: None if there is no neighbor."""


class Channel:
    """One direction of messages through this stage: it receives from `source` and sends to `target`."""

    def __init__(self, world: World, source: Endpoint, target: Endpoint) -> None:
        self._world = world
        self._source_group, self._source = source
        self._target_group, self._target = target
        # The tensor is kept with each operation: torch reads or writes its memory until the operation is done.
        self._pending_receives: deque[tuple[Tensor, dist.Work]] = deque()
        self._pending_sends: deque[tuple[Tensor, dist.Work]] = deque()
        self._buffers: Iterator[Tensor] = iter(())
        self._ready_buffers: deque[Tensor] = deque()  # of the next receives, which are not posted yet
        self._num_receives_ahead = MAX_PENDING if dist.get_backend(self._source_group) == dist.Backend.GLOO else 0

    @property
    def device(self) -> torch.device:
        """The device of this rank, where messages are received."""
        return self._world.device

    def set_buffers(self, buffers: Iterator[Tensor]) -> None:
        """Take one buffer for each message that will arrive, in order; `prepare_receive` creates the next one."""
        self._buffers = buffers

    def post_receives(self, buffers: Iterator[Tensor]) -> None:
        """Do the same, and prepare the first receives."""
        self.set_buffers(buffers)
        for _ in range(max(1, self._num_receives_ahead)):
            self.prepare_receive()

    def prepare_receive(self) -> None:
        """Create the buffer of the next message, if there is one; with gloo, post its receive."""
        buffer = next(self._buffers, None)
        if buffer is not None:
            self._ready_buffers.append(buffer)
            if self._num_receives_ahead:
                self.post_receive()

    def post_receive(self) -> None:
        """Post the next receive whose buffer exists, if it is not posted yet."""
        if self._ready_buffers:
            assert self._source is not None
            buffer = self._ready_buffers.popleft()
            work = self._start(lambda: dist.irecv(buffer, self._source, self._source_group), self._source, "receiving")
            self._pending_receives.append((buffer, work))

    def post_ahead(self) -> None:
        """Post the next receive, if there is one: its sender sends it before the next collective of both ranks.

        Otherwise the send would be pending during the collective, and a device that must first end its pending
        operations, to allocate memory, would never take part in it.
        """
        if not self._pending_receives:
            self.post_receive()

    def receive(self, description: str) -> Tensor:
        """Wait for the next message and return it; `description` names it in this rank's status and in errors."""
        if not self._pending_receives:
            self.post_receive()
        buffer, work = self._pending_receives.popleft()
        assert self._source is not None
        activity = f"{WAITING} for {description}"
        self._wait(work, self._source, status=activity, activity=activity)
        return buffer

    def send(self, tensor: Tensor) -> None:
        """Start sending a tensor, which the caller must not modify afterwards; do nothing without a target."""
        if self._target is None:
            return
        tensor = tensor.contiguous()
        work = self._start(lambda: dist.isend(tensor, self._target, self._target_group), self._target, "sending")
        self._pending_sends.append((tensor, work))
        # Wait for the older sends now: this frees their tensors during the step, not only at its end.
        self._wait_for_sends(MAX_PENDING)

    def flush(self) -> None:
        """Wait until all messages have been sent."""
        self._wait_for_sends(0)

    def _wait_for_sends(self, max_pending: int) -> None:
        while len(self._pending_sends) > max_pending:
            assert self._target is not None
            _, work = self._pending_sends.popleft()
            self._wait(work, self._target, status=f"{WAITING} to send to rank {self._target}", activity="sending")

    def _start(self, start: Callable[[], dist.Work | None], peer: int, activity: str) -> dist.Work:
        try:
            work = start()
        except RuntimeError as error:
            raise self._world.transfer_error(peer, activity) from error
        assert work is not None
        return work

    def _wait(self, work: dist.Work, peer: int, *, status: str, activity: str) -> None:
        """Wait for an operation; other ranks see `status`, and an error of this rank may say "while {activity}"."""
        before = self._world.status
        self._world.set_status(status)
        wait_started = self._world.wait_timer.begin()
        try:
            work.wait()
        except RuntimeError as error:
            raise self._world.transfer_error(peer, activity) from error
        self._world.wait_timer.end(wait_started)
        self._world.set_status(before)  # it computes again; a rank that waits is not the one that delays others
