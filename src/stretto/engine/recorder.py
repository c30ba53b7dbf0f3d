"""ActionRecorder: records when each action of a training step ran."""

import time

import torch

from stretto.plan.actions import Action
from stretto.plan.timeline import TimedAction


class ActionRecorder:
    """Appends each action with its start and end to `actions`, unless that is None, the default."""

    def __init__(self, device: torch.device) -> None:
        self.actions: list[TimedAction] | None = None
        self._device = device

    def now(self) -> float:
        """Return the time in seconds. While recording, wait first until an accelerator has finished its queued work."""
        if self.actions is not None and self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def record(self, stage: int, action: Action, start: float, stop: float | None = None) -> None:
        """If recording is on, record an action that ran from `start` to `stop`, or until now if `stop` is None."""
        if self.actions is not None:
            self.actions.append(TimedAction(stage, action, start, self.now() if stop is None else stop))
