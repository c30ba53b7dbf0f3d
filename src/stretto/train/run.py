"""Run: trains as a config says, from its data to the final weights."""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from safetensors.torch import save_file
from torch import Tensor

from stretto.base.errors import DataError, DivergedError, SavedInterrupt, StrettoError
from stretto.base.redact import without_secrets
from stretto.base.run_folder import CONFIG, RunFolder
from stretto.base.tf32 import use_tf32
from stretto.checkpoint.background_save import SaveReport
from stretto.checkpoint.checkpoint import Checkpoint, find_checkpoint
from stretto.checkpoint.lock import FolderLock
from stretto.checkpoint.manager import CheckpointManager
from stretto.checkpoint.manifest import RunInfo
from stretto.config.run import RunConfig
from stretto.config.toml import dump_config
from stretto.mesh.device import find_device
from stretto.mesh.world import World
from stretto.train.build import build_engine
from stretto.train.config_changes import ConfigChange, find_changes
from stretto.train.data_spec import data_spec_files
from stretto.train.evaluate import EvaluationInterruptedError, OnWindow, evaluate
from stretto.train.events import EvaluationReport, Event, PreemptedError, log_line
from stretto.train.log import CORRUPTION, LogWriter, has_line, open_log_writer
from stretto.train.node_report import NodeReport
from stretto.train.plan_check import PlanCheck, planned_seconds
from stretto.train.rank_monitor import RankMonitor
from stretto.train.run_table import run_table
from stretto.train.save_policy import SavePolicy
from stretto.train.signals import on_interrupt, on_preemption_signal
from stretto.train.sinks.node_sinks import NodeSinks
from stretto.train.start import check_same_data, checkpoint_location, prepare_run
from stretto.train.trace import gather_trace, save_trace
from stretto.train.trained_model import read_weights
from stretto.train.trainer import Request, StepReport, Trainer
from stretto.train.weight_check import CorruptionError, WeightCheck, WeightReport
from stretto.train.weights import load_initial_weights, save_weights

_log = logging.getLogger(__name__)
# A launch traces its tenth step, when caches are warm; or its last step, if it has fewer.
_TRACED_STEP = 10


class _Unfinished(NamedTuple):
    """Whether the run's folder lacks the final weights, and the evaluation that is due after the last saved step."""

    lacks_weights: bool
    lacks_evaluation: bool


class Run:
    """A run that is ready to start or resume: its config is checked and the checkpoint, if any, is loaded.

    `for event in run.events(): ...` trains, evaluates, saves and logs. With several ranks, each has its own Run and
    must iterate over its events; the first rank writes config, log and weights. `resume` is `auto` (from the newest
    checkpoint of this run, if there is one), `never`, or the path or URL of a checkpoint or run. `allowed_locations`
    are the URLs and paths where that checkpoint may be, if the files of a run refer to one elsewhere.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World | None = None,
        resume: str = "auto",
        *,
        allowed_locations: Sequence[str] = (),
    ) -> None:
        self.config = config
        self.folder = RunFolder(config.run.folder)
        self.world = world or World(rank=0, size=1, device=find_device(config.run.device))
        inputs = prepare_run(
            config,
            resume,
            allowed_locations,
            is_first_rank=self.world.is_rank_zero,
            ranks_per_node=self.world.local_size,
        )
        check_same_data(inputs, config, self.world)
        self.model, self.data_spec = inputs.model, inputs.train.data_spec
        self.valid = None if inputs.valid is None else inputs.valid.windows
        self.metrics = inputs.metrics
        self.engine = build_engine(inputs, config.layout, config.run, self.world)
        self.trainer = Trainer(
            self.engine, inputs.train.windows, config.train, seed=config.run.seed, workers=config.data.workers
        )
        self._num_failed_saves = 0  # in a row, on the first rank
        self._policy = SavePolicy(config.save, config.run.eval_every, has_validation=self.valid is not None)
        self._run_info = RunInfo(config=config.public(), layout=str(config.layout), data=inputs.train.digest)
        self._spec_files = data_spec_files(self.data_spec)
        self.checkpoints = self._make_checkpoints()
        self._lock = self._lock_folder() if self.world.is_rank_zero else None
        try:
            self.resumed = self.checkpoints.start(resume, allowed_locations)  # the checkpoint, or None
            self.changes = self._restore(self.resumed)
            self._unfinished = self._find_unfinished()
        except BaseException:
            self.close()
            raise
        self._is_interrupted = False
        self._weight_check: WeightCheck | None = None  # until the first step
        self._policy.restart_clock()

    @property
    def is_finished(self) -> bool:
        """Whether earlier launches have already trained, evaluated and written everything."""
        return self.trainer.is_done and not any(self._unfinished)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, step {self.trainer.step:,}, {self.config.layout})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks: the run's state, its last losses and its best checkpoint."""
        return run_table(self.folder, self.config.layout, self.trainer, checkpoint_location(self.config))

    def close(self) -> None:
        """Release the locks on the run's folder and checkpoints; `events` does so at its end."""
        self.checkpoints.close(wait=False)
        if self._lock is not None:
            self._lock.release()

    def events(
        self, on_window: OnWindow = lambda fraction: None, on_first_interrupt: Callable[[], None] = lambda: None
    ) -> Generator[Event]:
        """Train to the end and yield reports; `on_window` is called with the fraction of an evaluation that is done.

        On SIGTERM or SIGUSR1, the run saves after the current step and raises
        PreemptedError. On Ctrl-C, it saves too and raises KeyboardInterrupt; `on_first_interrupt` is called at once, in
        a signal handler. A second Ctrl-C raises KeyboardInterrupt at once.
        """

        def interrupt() -> None:
            self._is_interrupted = True
            self.trainer.request(Request.STOP)
            on_first_interrupt()

        try:
            with (
                self.checkpoints,
                on_preemption_signal(lambda: self.trainer.request(Request.STOP)),
                on_interrupt(interrupt),
                use_tf32(self.config.run.tf32),
            ):
                if not self.world.is_rank_zero:
                    yield from self._train_without_log(on_window)
                    return
                self._prepare_folder()
                with open_log_writer(self.folder, self.config, self.trainer.step) as log:
                    yield from self._train_and_log(log, on_window)
        finally:
            self.close()

    def _train_and_log(self, log: LogWriter, on_window: OnWindow) -> Iterator[Event]:
        """Log this launch; then train, and log each event before it is yielded."""
        log.write(
            "start",
            {
                "step": self.trainer.step,
                "generation": self.checkpoints.generation,
                "resumed_from": None if self.resumed is None else self.resumed.location,
                "ranks": self.world.size,
                "layout": str(self.config.layout),
                "changes": [str(change) for change in self.changes],
                "monitor": self.metrics.monitor,
                "mode": self.metrics.mode,
            },
        )
        try:
            with closing(self._train(on_window)) as events:
                for event in events:
                    if isinstance(event, NodeReport):
                        log.write_node(event)
                    else:
                        log.write(*log_line(event))
                        yield event
        except CorruptionError as error:
            log.write(CORRUPTION, asdict(error.corruption))
            self._leave_corrupted()
            raise

    def _train_without_log(self, on_window: OnWindow) -> Iterator[Event]:
        """Train on a rank other than rank 0; if it is the first of its node, it reports on the node to trackers."""
        sinks = NodeSinks(self.config.logging, self.folder.path)
        try:
            with sinks, closing(self._train(on_window)) as events:
                for event in events:
                    if isinstance(event, NodeReport):
                        sinks.write_node(event)
                    else:
                        yield event
        except CorruptionError:
            self._leave_corrupted()
            raise

    def _leave_corrupted(self) -> None:
        """Finish the save that is under way, whose weights were good; then let all ranks end together."""
        with suppress(StrettoError):
            self.checkpoints.close(wait=True)
        self.world.barrier()  # until rank 0 has logged it; a rank that exits may end the others

    def _train(self, on_window: OnWindow) -> Generator[Event | NodeReport]:
        trainer = self.trainer
        yield from self._finish_last_step(on_window)
        if self.config.sentinel.hash_every is not None:
            self._weight_check = WeightCheck(trainer)
        monitor = RankMonitor(self.engine, straggler_percent=self.config.sentinel.straggler)
        planned = planned_seconds(self.folder, self.config.layout) if self.world.is_rank_zero else (None, None)
        plan_check = PlanCheck(*planned)
        traced_step = trainer.step + _TRACED_STEP
        trainer.is_recording = True
        for report in self._steps():
            yield report
            is_preempted = Request.STOP in trainer.requested
            is_evaluated = (
                self.config.train.uses_evaluations and not is_preempted and self._policy.is_evaluation_due(trainer)
            )
            if is_evaluated:
                # Before the save: the result may end the run or lower the learning rate, so it is part of the state.
                yield from self._evaluate(on_window)
            self._check_weights(report.step, is_evaluated=is_evaluated)
            is_last = trainer.is_done or is_preempted
            monitor.add(report)
            if is_last or report.step % self.config.run.log_every == 0:
                rank_report, node_report = monitor.gather_by_node()
                straggler = None if rank_report is None else monitor.new_straggler(rank_report)
                yield from filter(None, (rank_report, node_report, straggler, self._take_weight_report()))
            if trainer.is_recording and (is_last or report.step == traced_step):
                self._save_trace()
            plan_report = plan_check.add_step(report.step, report.seconds, is_last=trainer.is_done)
            if plan_report is not None:
                yield plan_report
            if is_last or self._policy.is_save_due(trainer):
                # Save before the evaluation, so that an error there does not lose this step.
                self._save(wait=is_last)
            if trainer.is_done:
                self._save_weights()
            # On the first rank, report the saves that have ended by now.
            yield from self._saves()
            if is_preempted and not trainer.is_done:
                self._stop(
                    f"stopped after step {report.step}, as requested; that step is saved, so start again to resume"
                )
            if not is_evaluated and self._policy.is_evaluation_due(trainer):
                yield from self._evaluate(on_window)
            if self.world.is_rank_zero:
                self._policy.request_save_if_due(trainer)
        if (weight_report := self._take_weight_report()) is not None:
            yield weight_report  # of the last save
        # No rank exits before all are done: the first rank may host the key-value store, which the others still use.
        self.world.barrier()
        yield from self._saves()

    def _finish_last_step(self, on_window: OnWindow) -> Iterator[Event]:
        """Do what is left to do after the step that this launch resumes from."""
        trainer = self.trainer
        if trainer.is_done and self._unfinished.lacks_weights:
            self._save_weights()
        if self._unfinished.lacks_evaluation:
            was_done = trainer.is_done
            yield from self._evaluate(on_window)
            if trainer.is_done and not was_done:
                self._save(wait=True)
                self._save_weights()

    def _steps(self) -> Iterator[StepReport]:
        """Yield the reports of the trainer's steps; if it diverges, save the batch and name the file in the error."""
        try:
            for report in self.trainer:
                if self._weight_check is not None:
                    self._weight_check.add_step()
                yield report
        except DivergedError as error:
            if self._weight_check is not None:
                self._weight_check.check()  # a weight that changed silently may be the cause
            path = self.folder.nonfinite_batch(self.trainer.step + 1, self.world.rank)
            raise DivergedError(f"{error}; {_save_batch(self.trainer, path)}") from None

    def _evaluate(self, on_window: OnWindow) -> Iterator[EvaluationReport]:
        if self.valid is None:
            return
        try:
            with self.trainer.averaged_weights():
                evaluation = evaluate(
                    self.engine,
                    self.valid,
                    workers=self.config.data.workers,
                    on_window=on_window,
                    is_interrupted=lambda: self.trainer.is_pending(Request.STOP),
                    metrics=self.metrics.metrics,
                    class_names=self.data_spec.labels,
                )
        except EvaluationInterruptedError:
            if self.config.train.uses_evaluations:
                self._save(wait=True)  # this step is evaluated before it is saved
            elif not self.trainer.is_done:
                return  # the run stops after its next step
            self._stop(
                f"stopped in the evaluation after step {self.trainer.step}, as requested; that step is saved, so start "
                "again to repeat it"
            )
        score = self.metrics.score(evaluation)
        self.trainer.record_score(score.value, name=score.name, mode=score.mode)
        self.checkpoints.record_score(self.trainer.step, score.value, name=score.name, mode=score.mode)
        yield EvaluationReport(self.trainer.step, evaluation)

    def _stop(self, message: str) -> NoReturn:
        """End this rank after all have saved the same step."""
        self.world.barrier()  # the first rank may host the key-value store, which the others still use
        raise (SavedInterrupt(message) if self._is_interrupted else PreemptedError(message)) from None

    def _check_weights(self, step: int, *, is_evaluated: bool) -> None:
        """Compare the weights of replicas if it is time; an evaluation may have changed how the next steps continue."""
        is_due = is_evaluated or step % (self.config.sentinel.hash_every or 1) == 0
        if self._weight_check is not None and is_due:
            self._weight_check.check()

    def _take_weight_report(self) -> WeightReport | None:
        """Return, on the first rank, how often weights were compared since the last call, if they were."""
        if self._weight_check is None or not self.world.is_rank_zero:
            return None
        return self._weight_check.take_report()

    def _save(self, *, wait: bool) -> None:
        if self._weight_check is not None and self._weight_check.agreed_step != self.trainer.step:
            self._weight_check.check()  # so that no checkpoint has wrong weights
        snapshot = self.trainer.snapshot()
        self.checkpoints.save(replace(snapshot, run_info=self._run_info, files=self._spec_files), wait=wait)
        self._policy.restart_clock()

    def _saves(self) -> Iterator[SaveReport]:
        """Yield the reports of finished saves, on the first rank; raise if too many in a row have failed."""
        for report in iter(self.checkpoints.poll, None):
            yield report
            self._num_failed_saves = 0 if report.error is None else self._num_failed_saves + 1
            if self._num_failed_saves == self.config.save.max_failures:
                raise DataError(
                    f"save.max_failures={self._num_failed_saves}: so many saves in a row have failed, so the run would "
                    f"lose what it computes ({report.error}); make room, or set save.to to a different place"
                )

    def _save_weights(self) -> None:
        """Write the weights of all stages into one file, from the checkpoint of the last step."""
        if self.world.is_rank_zero:
            self.checkpoints.check_fence()  # raises if a newer launch has taken over
            checkpoint = find_checkpoint(checkpoint_location(self.config), self.config.data.retry_seconds)
            save_weights(read_weights(self.model, checkpoint), self.folder.weights)

    def _save_trace(self) -> None:
        """Write a trace of the step just taken, and stop recording: one trace per launch is enough."""
        self.trainer.is_recording = False
        trace = gather_trace(self.trainer)
        if trace is not None:
            save_trace(trace, self.folder)

    def _make_checkpoints(self) -> CheckpointManager:
        config = self.config
        return CheckpointManager(
            checkpoint_location(config),
            self.world,
            keep=config.save.keep,
            keep_every=config.save.keep_every,
            keep_best=config.save.keep_best,
            retry_seconds=config.data.retry_seconds,
            verify=config.save.verify,
        )

    def _restore(self, checkpoint: Checkpoint | None) -> list[ConfigChange]:
        """Load a checkpoint, or without one the initial weights; return the config's changes since the checkpoint."""
        changes: list[ConfigChange] = []
        if checkpoint is not None:
            self.trainer.restore(checkpoint)
            changes = find_changes(checkpoint.manifest.run_info.config, self.config)
        elif self.config.model.weights is not None:
            load_initial_weights(self.engine.stack, self.model, self.config.model.weights)
        # A run that stopped early by another metric continues.
        self.trainer.improvement = self.trainer.improvement.of_metric(self.metrics.monitor, self.metrics.mode)
        return changes

    def _find_unfinished(self) -> _Unfinished:
        """Return what is missing from the run's folder. The first rank checks; the all_reduce tells the others."""
        step, flags = self.trainer.step, [0.0, 0.0]
        if self.world.is_rank_zero:
            is_evaluation_due = step > 0 and self._policy.is_evaluation_due(self.trainer)
            # A run that depends on evaluations repeats one that its trainer has not counted, unless it is done.
            is_counted = self.trainer.improvement.last_step == step or self.trainer.is_done
            is_counted |= not self.config.train.uses_evaluations
            is_unevaluated = is_evaluation_due and not (is_counted and has_line(self.folder.log, "evaluation", step))
            flags = [float(not self.folder.is_finished), float(is_unevaluated)]
        return _Unfinished(*map(bool, self.world.all_reduce(flags)))

    def _lock_folder(self) -> FolderLock | None:
        with self.folder.explain_write_errors():
            self.folder.path.mkdir(parents=True, exist_ok=True)
            self.folder.log.touch()  # raises now if the log can't be written
        # Without save.to the checkpoints are in this folder, and their lock protects it.
        return None if self.config.save.to is None else FolderLock(self.folder.path)

    def _prepare_folder(self) -> None:
        if not self.trainer.is_done:
            # A finished run that now continues for more steps must not leave its old weights as the final ones.
            with self.folder.explain_write_errors():
                self.folder.weights.unlink(missing_ok=True)
        text = dump_config(self.config)
        self.folder.write(CONFIG, text.encode(), is_private=text != without_secrets(text))
        for name, content in self._spec_files.items():
            self.folder.write(name, content)


def _save_batch(trainer: Trainer, path: Path) -> str:
    """Save this rank's share of the last window, and the state it started from; return text for the error message."""
    assert trainer.window is not None
    window = {name: value for name, value in asdict(trainer.window).items() if isinstance(value, Tensor)}
    state = {f"state.{index}": tensor for index, tensor in enumerate(trainer.state or ())}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Copies: safetensors refuses views that share memory.
        save_file({name: value.cpu().clone().contiguous() for name, value in {**window, **state}.items()}, path)
    except OSError as error:
        return f"the batch can't be saved to {path} ({error.strerror})"
    return f"the batch is in {path}"
