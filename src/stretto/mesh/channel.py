"""Channel: the messages of one direction between two neighbouring stages.

Receives are posted ahead, so that a message lands while the stage computes; sends are waited for late.
"""

from collections import deque
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch import Tensor

from stretto.base.errors import StrettoError
from stretto.mesh.waits import Waits

WAITING = "waiting"
"""How the note of a rank begins that does nothing but wait for another."""

AHEAD = 2
"""How many receives are posted ahead of the one that is being worked on."""

End = tuple[dist.ProcessGroup | None, int | None]
"""A neighbour, and the process group that we share with it for one direction."""


class Channel:
    """One direction: a source sends to us, we send to a target; either may be none, at the end of the line."""

    def __init__(
        self,
        source: End,
        target: End,
        lost: Callable[[int, str], StrettoError],
        waits: Waits,
        note: Callable[[object], None] = lambda doing: None,
    ) -> None:
        self._from_group, self._source = source
        self._to_group, self._target = target
        self._lost = lost
        self._waits = waits
        self._note = note
        self._coming: deque[tuple[Tensor, dist.Work]] = deque()
        self._going: deque[tuple[Tensor, dist.Work]] = deque()
        self._buffers: Iterator[Tensor] = iter(())

    def expect(self, buffers: Iterator[Tensor]) -> None:
        """Say what will come, message by message; the first receives are posted at once."""
        self._buffers = buffers
        for _ in range(AHEAD):
            self._post()

    def take(self, what: str) -> Tensor:
        """Wait for the next message and return it; `what` says what it is, should it never come."""
        buffer, work = self._coming.popleft()
        assert self._source is not None
        self._wait(work, self._source, f"{WAITING} for {what}")
        self._post()
        return buffer

    def send(self, tensor: Tensor) -> None:
        """Send a message and go on; it must not be changed any more."""
        if self._target is None:
            return
        tensor = tensor.contiguous()
        work = self._start(lambda: dist.isend(tensor, self._target, self._to_group), self._target, "sending")
        self._going.append((tensor, work))
        # Late, but not for ever: what has left need not be kept. No order waits for more than one that is under way.
        self._drain(AHEAD)

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        self._drain(0)

    def _drain(self, most: int) -> None:
        while len(self._going) > most:
            assert self._target is not None
            self._wait(self._going.popleft()[1], self._target, "sending")

    def _post(self) -> None:
        buffer = next(self._buffers, None)
        if buffer is not None:
            assert self._source is not None
            work = self._start(lambda: dist.irecv(buffer, self._source, self._from_group), self._source, "receiving")
            self._coming.append((buffer, work))

    def _start(self, start: Callable[[], dist.Work | None], peer: int, doing: str) -> dist.Work:
        try:
            work = start()
        except RuntimeError as error:
            raise self._lost(peer, doing) from error
        assert work is not None
        return work

    def _wait(self, work: dist.Work, peer: int, doing: str) -> None:
        self._note(doing if doing.startswith(WAITING) else f"{WAITING} while {doing} to rank {peer}")
        started = self._waits.begin()
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(peer, doing) from error
        self._waits.end(started)
