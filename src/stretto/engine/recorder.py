"""ActionRecorder: when each action of a step ran."""

import time

import torch

from stretto.plan.actions import Action
from stretto.plan.timeline import TimedAction


class ActionRecorder:
    """Records actions while `actions` is a list; None, the default, turns it off."""

    def __init__(self, device: torch.device) -> None:
        self.actions: list[TimedAction] | None = None
        self._device = device

    def now(self) -> float:
        """Return the time; on an accelerator, while recording, the time at which it has finished its work."""
        if self.actions is not None and self._device.type != "cpu":
            # Without this it would be the time at which the kernels were queued.
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def record(self, stage: int, action: Action, start: float, stop: float | None = None) -> None:
        """Record an action that ran from `start` to `stop`, by default until now."""
        if self.actions is not None:
            self.actions.append(TimedAction(stage, action, start, self.now() if stop is None else stop))
