"""ActionRecorder: records when each action of a training step ran."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stretto.mesh.device_clock import DeviceClock, Timestamp
from stretto.plan.actions import Action
from stretto.plan.timeline import TimedAction


class ActionRecorder:
    """Records the start and end of each action between `start` and `stop`; otherwise does nothing.

    It never waits for the device, so a recorded step runs exactly as any other.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = DeviceClock(device)
        self._recorded: list[tuple[int, Action, Timestamp, Timestamp]] | None = None

    def start(self) -> None:
        """Record the actions from now on."""
        self._recorded = []

    def stop(self) -> list[TimedAction]:
        """Stop recording and return the recorded actions, with times of this host's clock.

        Call it when the step's result has been read: on an accelerator, this waits for the last action.
        """
        recorded, self._recorded = self._recorded or [], None
        times = iter(self._clock.host_times([time for _, _, start, stop in recorded for time in (start, stop)]))
        return [TimedAction(stage, action, next(times), next(times)) for stage, action, _, _ in recorded]

    @contextmanager
    def action(self, stage: int, action: Action) -> Iterator[None]:
        """Record what runs in this context as an action of a stage."""
        if self._recorded is None:
            yield
            return
        started = self._clock.now()
        yield
        self._recorded.append((stage, action, started, self._clock.now()))
