"""DeviceClock: takes times on a device without making the host wait for it."""

import time
from collections.abc import Sequence

import torch

Timestamp = float | torch.Event
"""A time on the CPU, or an event in an accelerator's stream (the host only queues work there and runs ahead)."""


class DeviceClock:
    """Takes timestamps during a training step, and reads them once the step is over.

    On an accelerator a timestamp is an event. A step must never wait for its device: a message that another rank has
    yet to send may be at the head of a queue, and that rank may be waiting for work that this host has yet to queue.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Timestamp:
        """Return the time at which the device reaches this point."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def seconds_between(self, start: Timestamp, stop: Timestamp) -> float:
        """Return the seconds from `start` to `stop`; waits until the device has reached `stop`."""
        if isinstance(start, float) and isinstance(stop, float):
            return stop - start
        assert isinstance(start, torch.Event) and isinstance(stop, torch.Event)
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3

    def host_times(self, timestamps: Sequence[Timestamp]) -> list[float]:
        """Return timestamps as times of `time.perf_counter`; waits until the device has done all its work."""
        end = self.now()
        self.seconds_between(end, end)
        # The device has just reached `end`, so this is the time of `end` on the host.
        host_end = time.perf_counter()
        return [
            timestamp if isinstance(timestamp, float) else host_end - self.seconds_between(timestamp, end)
            for timestamp in timestamps
        ]

    def has_passed(self, timestamp: Timestamp) -> bool:
        """Return whether the device has reached a timestamp; never waits."""
        return isinstance(timestamp, float) or timestamp.query()
