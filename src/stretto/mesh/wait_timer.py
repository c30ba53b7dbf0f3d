"""WaitTimer: how long this rank has waited for others, measured on its device."""

import time

import torch

Timestamp = float | torch.Event
"""A time on the CPU, or an event in an accelerator's stream (the CPU only queues work there and runs ahead)."""

# Reading an event blocks until the stream reaches it. So `end` reads events only if more than this many are pending.
_MAX_PENDING = 1024


class WaitTimer:
    """Sums the seconds from `begin` to `end`, and from `begin_all_reduce` to `end_all_reduce` or the next `begin`.

    On an accelerator the stream, not the CPU, waits for a message. There, events before and after the wait measure it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._pending: list[tuple[torch.Event, torch.Event]] = []
        self._all_reduce_start: Timestamp | None = None

    @property
    def seconds(self) -> float:
        """The seconds waited so far. On an accelerator, reading them synchronizes with the last wait."""
        self._read_events()
        return self._seconds

    def begin(self) -> Timestamp:
        """Return the time now, when this rank begins to wait; pass it to `end`."""
        self.end_all_reduce()
        return self._now()

    def end(self, since: Timestamp) -> None:
        """Add the time since `begin` returned `since`."""
        now = self._now()
        if isinstance(since, float) and isinstance(now, float):
            self._seconds += now - since
            return
        assert isinstance(since, torch.Event) and isinstance(now, torch.Event)
        self._pending.append((since, now))
        if len(self._pending) > _MAX_PENDING:
            self._read_events()

    def begin_all_reduce(self) -> None:
        """Start counting: this rank has computed all its gradients and now waits for those of other ranks."""
        self._all_reduce_start = self._now()

    def end_all_reduce(self) -> None:
        """Stop counting, if `begin_all_reduce` was called."""
        if self._all_reduce_start is not None:
            since, self._all_reduce_start = self._all_reduce_start, None
            self.end(since)

    def _now(self) -> Timestamp:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _read_events(self) -> None:
        for start, stop in self._pending:
            stop.synchronize()
            self._seconds += start.elapsed_time(stop) / 1e3
        self._pending.clear()
