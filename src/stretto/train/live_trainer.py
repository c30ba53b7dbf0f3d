"""LiveTrainer: trains like Trainer, and continues in the same processes when replicas are lost and others join."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Self

from stretto.base.errors import ConfigError, LostPeerError, StateLostError
from stretto.base.units import pluralize
from stretto.checkpoint.manager import CheckpointManager
from stretto.config.layout import Layout
from stretto.mesh.live_world import live_world
from stretto.mesh.rounds import RunEndedError
from stretto.mesh.timeouts import poll
from stretto.mesh.topology import Topology
from stretto.mesh.world import TIMEOUT, World
from stretto.train.live_recovery import LiveRecovery
from stretto.train.trainer import Request, StepReport, Trainer

_log = logging.getLogger(__name__)
_END_SECONDS = 1.0  # for a rank that has passed the last barrier to say so

MakeTrainer = Callable[[World, Layout], Trainer]
"""Builds this rank's engine and trainer for the present ranks; the layout has as many replicas as there are now."""


class LiveTrainer:
    """Takes the steps of a run; if a replica is lost, the others take over its rows of the same batches.

    `for report in trainer: ...` takes all steps, as with `Trainer`. Use it as a context manager:

        with LiveTrainer(make_trainer, Layout(replicas=3)) as trainer:
            for report in trainer:
                ...

    `make_trainer` is called again whenever the ranks change. What it returns is at the first step, or at a step that it
    has restored from a checkpoint; if other ranks have gone further, it gets their weights and states. A process that
    comes when they are done exits with 0. `layout` is that of all ranks that are launched. `trainer.trainer` and
    `trainer.world` are the present ones. With `copy_every`, each rank keeps a copy of another one's state after so many
    steps: a stage that no other replica has is not lost then.

    If all ranks that had some part of the state are lost, the run resumes from the newest checkpoint in `checkpoints`,
    a folder or URL. It saves there every `save_every` steps and after the last one. A new launch resumes from it, too.
    """

    def __init__(
        self,
        make_trainer: MakeTrainer,
        layout: Layout,
        *,
        device: str = "auto",
        timeout: timedelta = TIMEOUT,
        secret_folder: Path | str | None = None,
        copy_every: int = 0,
        checkpoints: Path | str | None = None,
        save_every: int = 100,
    ) -> None:
        if save_every < 1:
            raise ConfigError(f"save_every={save_every} must be at least 1")
        self._copy_every = copy_every
        self._location, self._save_every = checkpoints, save_every
        self._checkpoints: CheckpointManager | None = None  # of the present ranks
        self._make_trainer, self._layout = make_trainer, layout
        topology = Topology(layout.replicas, layout.stages, layout.adjacent, layout.spans)
        self._context = live_world(topology, device=device, timeout=timeout, secret_folder=secret_folder)
        self._exit_stack = ExitStack()
        self._recovery: LiveRecovery | None = None
        self._trainer: Trainer | None = None
        self._report: StepReport | None = None  # of a step that was finished while the ranks changed
        self._has_ended = False  # all steps are done, on all ranks
        self._is_planned = False  # all ranks regroup before the next step, to let others join
        self._can_resume = checkpoints is not None  # if the ranks have lost what they had in memory

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._recovery = LiveRecovery(stack.enter_context(self._context), self._copy_every)
            self._start()
            self._exit_stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._trainer = None
        if self._recovery is not None and error[0] is None:
            self._recovery.finish_copy()
        self._close_checkpoints(wait=error[0] is None)
        self._exit_stack.__exit__(*error)  # type: ignore[arg-type]

    @property
    def trainer(self) -> Trainer:
        """The present trainer; another one after the ranks have changed."""
        assert self._trainer is not None, "use it in a with statement"
        return self._trainer

    @property
    def world(self) -> World:
        """The present ranks."""
        return self.trainer.engine.mesh.world

    @property
    def num_replicas(self) -> int:
        """The present number of replicas."""
        return self.trainer.engine.mesh.num_replicas

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepReport:
        # After each change of ranks, another step may be next, or none: the others may have taken the last one.
        while self._report is None:
            if self.trainer.is_done:
                # A rank that was lost in the last step may have left it to the others to finish.
                if self._has_ended or self._call(self._end):
                    raise StopIteration
            elif self._is_planned:
                self._change_ranks(is_planned=True)
            else:
                self._call(self._take_step)
        report, self._report = self._report, None
        return report

    def _call(self, action: Callable[[], None]) -> bool:
        """Call an action of all ranks, and return True; if ranks are lost meanwhile, continue without them."""
        try:
            action()
            return True
        except LostPeerError as error:
            _log.warning("%s; continuing without it", error)
        # Not in the `except` block: there, the error still refers to connections that other ranks wait for.
        self._change_ranks(is_planned=False)
        return False

    def _end(self) -> None:
        assert self._recovery is not None
        self._recovery.finish_copy()
        try:
            self.world.barrier()
        except LostPeerError:
            # Others may have passed the barrier. Then all is done, and nobody meets this rank again.
            if not poll(self._recovery.live.has_ended, _END_SECONDS):
                raise
        # At once, not only in __exit__: one that is lost in the barrier must not keep others waiting for this one.
        self._recovery.live.end()
        self._has_ended = True

    def _take_step(self) -> None:
        assert self._recovery is not None
        if self._recovery.live.has_newcomers():
            self.trainer.request(Request.REGROUP)
        self._report = self.trainer.advance()  # the step counts, even if a rank is lost before it is saved
        self._recovery.update(self.trainer)
        self._is_planned = Request.REGROUP in self.trainer.requested
        self._save(self.trainer)

    def _save(self, trainer: Trainer) -> None:
        """Save the trainer's state in the background, if it is time; wait for the last save."""
        if self._checkpoints is None:
            return
        is_last = trainer.is_done or Request.STOP in trainer.requested
        if is_last or trainer.step % self._save_every == 0:
            self._checkpoints.save(trainer.snapshot(), wait=is_last)
        if self._is_planned:
            # Together: a rank that still writes would come too late for the others, and be replaced.
            self._checkpoints.finish_save()
        for save in iter(self._checkpoints.poll, None):
            if save.error is not None:
                _log.warning("step %d was not saved: %s", save.step, save.error)

    def _close_checkpoints(self, *, wait: bool) -> None:
        checkpoints, self._checkpoints = self._checkpoints, None
        if checkpoints is not None:
            checkpoints.close(wait=wait)

    def _change_ranks(self, *, is_planned: bool) -> None:
        assert self._recovery is not None
        self._trainer = None
        self._close_checkpoints(wait=is_planned)
        self._recovery.leave()
        self._start(is_planned=is_planned)

    def _start(self, *, is_planned: bool = False) -> None:
        """Meet with the other ranks, and make a trainer for them; again if a rank is lost meanwhile."""
        assert self._recovery is not None
        while self._trainer is None:
            try:
                self._report = self._recovery.regroup(is_planned=is_planned) or self._report
            except RunEndedError as error:
                # A success, but without a trainer: what the script does after its last step is not for this rank.
                _log.warning("%s", error)
                raise SystemExit(0) from None
            is_planned = self._is_planned = False
            try:
                self._trainer = self._make_restored()
            except LostPeerError as error:
                is_lost = isinstance(error, StateLostError)
                if is_lost and not self._can_resume:
                    raise
                _log.warning("%s%s", error, "" if is_lost else "; continuing without it")
            if self._trainer is None:
                self._close_checkpoints(wait=False)
                self._recovery.leave()
                if is_lost:
                    self._recovery.forget()

    def _make_restored(self) -> Trainer:
        """Make a trainer with the newest state that the present ranks have, in memory or in a checkpoint."""
        assert self._recovery is not None
        recovery, live = self._recovery, self._recovery.live
        layout = self._layout.model_copy(update={"replicas": live.grid.num_replicas})
        change = recovery.find_change()
        trainer = self._make_trainer(live.world, layout)
        if self._location is not None:
            # A rank that was left out may still hold the lock.
            from_memory = recovery.can_restore
            self._checkpoints = CheckpointManager(self._location, live.world, needs_lock=not from_memory)
            checkpoint = self._checkpoints.start(is_launch=change is None, from_memory=from_memory)
            if checkpoint is not None:  # never if the ranks continue from memory
                trainer.restore(checkpoint)
        self._can_resume = self._location is not None or trainer.step > 0
        if not self._can_resume and recovery.has_lost_steps:
            raise StateLostError(
                "all ranks that had a part of the model's state are lost; pass checkpoints=FOLDER to LiveTrainer, and "
                "start again"
            )
        recovery.restore(trainer)
        if trainer.is_done and change is not None:
            self._save(trainer)  # a rank that was lost may not have written its part
        if change is not None and live.world.is_rank_zero:
            _log.warning(
                "%s; continuing after step %d with %s",
                change, trainer.step, pluralize(live.grid.num_replicas, "replica"),
            )  # fmt: skip
        return trainer
