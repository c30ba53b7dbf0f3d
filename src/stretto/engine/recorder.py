"""ActionRecorder: records when each action of a training step ran."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from stretto.mesh.device_clock import DeviceClock, Timestamp
from stretto.plan.actions import Action
from stretto.plan.timeline import TimedAction

_NOT_RECORDED = nullcontext()


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

    def action(self, stage: int, action: Action) -> AbstractContextManager[None]:
        """Return the context of an action of a stage, which is recorded if recording is on."""
        return _NOT_RECORDED if self._recorded is None else self._record(self._recorded, stage, action)

    @contextmanager
    def _record(
        self, recorded: list[tuple[int, Action, Timestamp, Timestamp]], stage: int, action: Action
    ) -> Iterator[None]:
        started = self._clock.now()
        yield
        recorded.append((stage, action, started, self._clock.now()))
