"""Waits: how long this rank has waited for others, on the clock of whatever computes."""

import time

import torch

Timestamp = float | torch.Event
"""A moment: of this process, or of an accelerator's stream, which the process runs ahead of."""

# Moments of a stream are looked at late, when it has passed them, but not kept for ever.
_MAX_PENDING = 1024


class WaitTimer:
    """Adds up the seconds between `begin` and `end`, and between `begin_all_reduce` and whatever comes next.

    A stream that waits for a message does so on the device: events before and after tell how long.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._pending: list[tuple[torch.Event, torch.Event]] = []
        self._all_reduce_start: Timestamp | None = None

    @property
    def seconds(self) -> float:
        """All so far."""
        self._resolve()
        return self._seconds

    def begin(self) -> Timestamp:
        """Return the moment at which this rank begins to wait."""
        self.end_all_reduce()
        return self._now()

    def end(self, since: Timestamp) -> None:
        """Add the time since a moment."""
        now = self._now()
        if isinstance(since, float) and isinstance(now, float):
            self._seconds += now - since
            return
        assert isinstance(since, torch.Event) and isinstance(now, torch.Event)
        self._pending.append((since, now))
        if len(self._pending) > _MAX_PENDING:
            self._resolve()

    def begin_all_reduce(self) -> None:
        """This rank has added its last gradient: what is left of its backward is waiting for those of others."""
        self._all_reduce_start = self._now()

    def end_all_reduce(self) -> None:
        """The sums are there, if any were waited for."""
        if self._all_reduce_start is not None:
            since, self._all_reduce_start = self._all_reduce_start, None
            self.end(since)

    def _now(self) -> Timestamp:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _resolve(self) -> None:
        for start, stop in self._pending:
            stop.synchronize()
            self._seconds += start.elapsed_time(stop) / 1e3
        self._pending.clear()
