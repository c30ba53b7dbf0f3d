"""WaitTimer: how long this rank has waited for others, measured on its device."""

from collections import deque

import torch

from stretto.mesh.device_clock import DeviceClock, Timestamp


class WaitTimer:
    """Sums the seconds from `begin` to `end`, and from `begin_all_reduce` to `end_all_reduce` or the next `begin`.

    On an accelerator the stream, not the CPU, waits for a message. There, events before and after the wait measure it.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = DeviceClock(device)
        self._seconds = 0.0
        self._pending: deque[tuple[Timestamp, Timestamp]] = deque()  # waits that the device may not have reached yet
        self._all_reduce_start: Timestamp | None = None

    @property
    def seconds(self) -> float:
        """The seconds waited so far. On an accelerator, without the waits that the device has not reached yet."""
        while self._pending and self._clock.has_passed(self._pending[0][1]):
            self._seconds += self._clock.seconds_between(*self._pending.popleft())
        return self._seconds

    def begin(self) -> Timestamp:
        """Return the time now, when this rank begins to wait; pass it to `end`."""
        self.end_all_reduce()
        return self._clock.now()

    def end(self, since: Timestamp) -> None:
        """Add the time since `begin` returned `since`."""
        self._pending.append((since, self._clock.now()))

    def begin_all_reduce(self) -> None:
        """Start counting: this rank has computed all its gradients and now waits for those of other ranks."""
        self._all_reduce_start = self._clock.now()

    def end_all_reduce(self) -> None:
        """Stop counting, if `begin_all_reduce` was called."""
        if self._all_reduce_start is not None:
            since, self._all_reduce_start = self._all_reduce_start, None
            self.end(since)
