"""Channel: the messages of one direction between two neighbouring stages.

Receives are posted ahead, so that a message lands while the stage computes; sends are waited for late.
"""

from collections import deque
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch import Tensor

from stretto.base.errors import StrettoError
from stretto.mesh.wait_timer import WaitTimer

WAITING = "waiting"
"""How the note of a rank begins that does nothing but wait for another."""

NUM_RECEIVES_AHEAD = 2
"""How many receives are posted ahead of the one that is being worked on."""

Endpoint = tuple[dist.ProcessGroup | None, int | None]
"""A neighbour, and the process group that we share with it for one direction."""


class Channel:
    """One direction: a source sends to us, we send to a target; either may be none, at the end of the line."""

    def __init__(
        self,
        source: Endpoint,
        target: Endpoint,
        peer_lost_error: Callable[[int, str], StrettoError],
        wait_timer: WaitTimer,
        set_status: Callable[[object], None] = lambda activity: None,
    ) -> None:
        self._from_group, self._source = source
        self._to_group, self._target = target
        self._peer_lost_error = peer_lost_error
        self._wait_timer = wait_timer
        self._set_status = set_status
        self._pending_receives: deque[tuple[Tensor, dist.Work]] = deque()
        self._pending_sends: deque[tuple[Tensor, dist.Work]] = deque()
        self._buffers: Iterator[Tensor] = iter(())

    def post_receives(self, buffers: Iterator[Tensor]) -> None:
        """Say what will come, message by message; the first receives are posted at once."""
        self._buffers = buffers
        for _ in range(NUM_RECEIVES_AHEAD):
            self._post_next_receive()

    def receive(self, description: str) -> Tensor:
        """Wait for the next message and return it; `description` says description it is, should it never come."""
        buffer, work = self._pending_receives.popleft()
        assert self._source is not None
        self._wait(work, self._source, f"{WAITING} for {description}")
        self._post_next_receive()
        return buffer

    def send(self, tensor: Tensor) -> None:
        """Send a message and go on; it must not be changed any more."""
        if self._target is None:
            return
        tensor = tensor.contiguous()
        work = self._start(lambda: dist.isend(tensor, self._target, self._to_group), self._target, "sending")
        self._pending_sends.append((tensor, work))
        # Late, but not for ever: what has left need not be kept. No order waits for more than one that is under way.
        self._drain(NUM_RECEIVES_AHEAD)

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        self._drain(0)

    def _drain(self, max_pending: int) -> None:
        while len(self._pending_sends) > max_pending:
            assert self._target is not None
            self._wait(self._pending_sends.popleft()[1], self._target, "sending")

    def _post_next_receive(self) -> None:
        buffer = next(self._buffers, None)
        if buffer is not None:
            assert self._source is not None
            work = self._start(lambda: dist.irecv(buffer, self._source, self._from_group), self._source, "receiving")
            self._pending_receives.append((buffer, work))

    def _start(self, start: Callable[[], dist.Work | None], peer: int, activity: str) -> dist.Work:
        try:
            work = start()
        except RuntimeError as error:
            raise self._peer_lost_error(peer, activity) from error
        assert work is not None
        return work

    def _wait(self, work: dist.Work, peer: int, activity: str) -> None:
        self._set_status(activity if activity.startswith(WAITING) else f"{WAITING} while {activity} to rank {peer}")
        started = self._wait_timer.begin()
        try:
            work.wait()
        except RuntimeError as error:
            raise self._peer_lost_error(peer, activity) from error
        self._wait_timer.end(started)
