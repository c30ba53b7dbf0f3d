"""SavePolicy: decides when a run evaluates and when it saves a checkpoint; `Run` itself always saves the last step."""

import time

from stretto.config.run import SaveConfig
from stretto.train.trainer import Request, Trainer


class SavePolicy:
    """Save every `save.every` steps or `save.minutes` minutes. Evaluate every `eval_every` steps and at the end."""

    def __init__(self, config: SaveConfig, eval_every: int | None, *, has_validation: bool) -> None:
        self._config = config
        self._eval_every = eval_every
        self._has_validation = has_validation
        self._last_save_time = time.monotonic()

    def is_evaluation_due(self, trainer: Trainer) -> bool:
        """Return whether to evaluate after the step that the trainer has just taken."""
        if not self._has_validation:
            return False
        return trainer.is_done or (self._eval_every is not None and trainer.step % self._eval_every == 0)

    def is_save_due(self, trainer: Trainer) -> bool:
        """Return whether to save the step that the trainer has just taken; all ranks get the same answer."""
        is_due = self._config.every is not None and trainer.step % self._config.every == 0
        # The best checkpoint can only be kept if every step that is evaluated is saved.
        is_candidate = self._config.keep_best and self.is_evaluation_due(trainer)
        return is_due or is_candidate or Request.SAVE in trainer.requested

    def restart_clock(self) -> None:
        """Restart the count of minutes until the next save."""
        self._last_save_time = time.monotonic()

    def request_save_if_due(self, trainer: Trainer) -> None:
        """Request a save if enough minutes have passed. Only the first rank calls this: its clock decides for all."""
        seconds = 60 * self._config.minutes
        if seconds and time.monotonic() - self._last_save_time > seconds:
            trainer.request(Request.SAVE)
