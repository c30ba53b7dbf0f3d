"""Run: a config carried out, from its data to the final weights."""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

from stretto.base.errors import DivergedError
from stretto.base.run_folder import CONFIG, RunFolder
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
from stretto.train.events import EvaluationReport, Event, PreemptedError
from stretto.train.initial_weights import load_initial_weights
from stretto.train.log import Recorder, has_evaluation, open_recorder
from stretto.train.nonfinite_batch import save_nonfinite_batch
from stretto.train.optimizer import averaged_weights
from stretto.train.plan_check import PlanCheck, predicted_seconds
from stretto.train.rank_monitor import RankMonitor
from stretto.train.save_policy import SavePolicy
from stretto.train.signals import on_preemption_signal
from stretto.train.start import checkpoint_location, prepare_run
from stretto.train.trace import gather_trace, save_trace
from stretto.train.trained_model import read_weights
from stretto.train.trainer import Request, StepReport, Trainer
from stretto.train.weights import save_weights

# The step after a start that is traced: caches are warm by then.
_TRACED_STEP = 10


class _Unfinished(NamedTuple):
    """What an earlier start did not get to after its last save."""

    weights: bool
    evaluation: bool


class Run:
    """A run that is ready to start or resume: its config is checked and its last checkpoint is loaded.

    `for event in run.events(): ...` trains, evaluates, saves and logs. With several ranks each has its own Run, and
    all of them must iterate over the events; the first rank writes config, log and weights. `resume` is `auto`
    (from the newest checkpoint in the folder, if there is one), `never`, or the path of a checkpoint.
    """

    def __init__(self, config: RunConfig, world: World | None = None, resume: str = "auto") -> None:
        self.config = config
        self.folder = RunFolder(config.run.folder)
        self.world = world or World(rank=0, size=1, device=find_device(config.run.device))
        # Data, model and loss, which fit together and fit the checkpoint.
        inputs = prepare_run(config, resume)
        self.model, self.data_spec = inputs.model, inputs.train.data_spec
        self.valid = None if inputs.valid is None else inputs.valid.windows
        self.engine = build_engine(inputs, config.layout, config.run, self.world)
        self.trainer = Trainer(
            self.engine, inputs.train.windows, config.train, seed=config.run.seed, workers=config.data.workers
        )
        self._policy = SavePolicy(config.save, config.run.eval_every, has_validation=self.valid is not None)
        self._run_info = RunInfo(
            config=config.model_dump(mode="json"), layout=str(config.layout), data=inputs.train.digest
        )
        self._files = data_spec_files(self.data_spec)
        self.checkpoints = CheckpointManager(
            checkpoint_location(config),
            self.world,
            keep=config.save.keep,
            keep_every=config.save.keep_every,
            keep_best=config.save.keep_best,
            retry_seconds=config.data.retry_seconds,
        )
        self._lock = self._lock_folder() if self.world.is_rank_zero else None
        try:
            self.resumed = self.checkpoints.start(resume)
            self.changes = self._restore(self.resumed)
            self._unfinished = self._find_unfinished()
        except BaseException:
            self.close()
            raise
        self._policy.restart_clock()

    @property
    def is_finished(self) -> bool:
        """Has an earlier start of this run done everything?"""
        return self.trainer.is_done and not any(self._unfinished)

    def close(self) -> None:
        """Release the run's folder; `events` does so at its end."""
        self.checkpoints.close(wait=False)
        if self._lock is not None:
            self._lock.release()

    def events(self, on_window: OnWindow = lambda fraction: None) -> Iterator[Event]:
        """Train to the end; `on_window` is called with the fraction of an evaluation that is done."""
        try:
            with self.checkpoints, on_preemption_signal(lambda: self.trainer.request(Request.STOP)):
                if not self.world.is_rank_zero:
                    yield from self._train(on_window)
                    return
                self._write_files()
                with open_recorder(self.folder, self.config, self.trainer.step) as recorder:
                    yield from self._recorded(recorder, on_window)
        finally:
            self.close()

    def _recorded(self, recorder: Recorder, on_window: OnWindow) -> Iterator[Event]:
        """The events of this start, each in the log before anyone sees it."""
        recorder.write(
            "start",
            {
                "step": self.trainer.step,
                "generation": self.checkpoints.generation,
                "resumed_from": None if self.resumed is None else self.resumed.location,
                "ranks": self.world.size,
                "layout": str(self.config.layout),
                "changes": [str(change) for change in self.changes],
            },
        )
        with closing(self._train(on_window)) as events:
            for event in events:
                recorder.record(event)
                yield event

    def _train(self, on_window: OnWindow) -> Generator[Event]:
        trainer = self.trainer
        if trainer.is_done and self._unfinished.weights:
            self._save_weights()
        if self._unfinished.evaluation:
            yield from self._evaluate(on_window)
        monitor = RankMonitor(self.engine)
        plan = PlanCheck(predicted_seconds(self.folder, self.config.layout) if self.world.is_rank_zero else None)
        traced_step = trainer.step + _TRACED_STEP
        trainer.is_recording = True
        for report in self._steps():
            yield report
            is_preempted = Request.STOP in trainer.agreed
            is_last = trainer.is_done or is_preempted
            monitor.add(report)
            if is_last or report.step % self.config.run.log_every == 0:
                rank_report = monitor.gather()
                if rank_report is not None:
                    yield rank_report
            if trainer.is_recording and (is_last or report.step == traced_step):
                self._save_trace()
            plan_report = plan.add_step(report.step, report.seconds, is_last=trainer.is_done)
            if plan_report is not None:
                yield plan_report
            if is_last or self._policy.is_save_due(trainer):
                # Before the evaluation: whatever that meets, this step is safe.
                self._save(wait=is_last)
            if trainer.is_done:
                self._save_weights()
            # The saves that have ended by now, on the first rank.
            yield from iter(self.checkpoints.poll, None)
            if is_preempted and not trainer.is_done:
                self.world.barrier()
                raise PreemptedError(
                    f"stopped after step {report.step}, as requested: it is saved, start again to resume"
                )
            if self._policy.is_evaluation_due(trainer):
                yield from self._evaluate(on_window)
            if self.world.is_rank_zero:
                self._policy.request_save_if_due(trainer)
        # Nobody leaves before all are done: the first rank may hold the store that the others still read.
        self.world.barrier()
        yield from iter(self.checkpoints.poll, None)

    def _steps(self) -> Iterator[StepReport]:
        try:
            yield from self.trainer
        except DivergedError as error:
            path = self.folder.nonfinite_batch(self.trainer.step + 1, self.world.rank)
            raise DivergedError(f"{error}; {save_nonfinite_batch(self.trainer, path)}") from None

    def _evaluate(self, on_window: OnWindow) -> Iterator[EvaluationReport]:
        if self.valid is None:
            return
        try:
            with averaged_weights(self.trainer.optimizer):
                evaluation = evaluate(
                    self.engine,
                    self.valid,
                    workers=self.config.data.workers,
                    on_window=on_window,
                    is_interrupted=lambda: self.trainer.is_requested(Request.STOP),
                )
        except EvaluationInterruptedError:
            return
        self.checkpoints.record_loss(self.trainer.step, evaluation.loss)
        yield EvaluationReport(self.trainer.step, evaluation)

    def _save(self, *, wait: bool) -> None:
        snapshot = self.trainer.snapshot()
        self.checkpoints.save(replace(snapshot, run_info=self._run_info, files=self._files), wait=wait)
        self._policy.restart_clock()

    def _save_weights(self) -> None:
        """Write the weights of all stages into one file, from the checkpoint that was just saved."""
        if self.world.is_rank_zero:
            self.checkpoints.check_fence()
            checkpoint = find_checkpoint(self.checkpoints.location, self.config.data.retry_seconds)
            save_weights(read_weights(self.model, checkpoint), self.folder.weights)

    def _save_trace(self) -> None:
        """Write what all ranks did in the last step; one trace per start is enough."""
        self.trainer.is_recording = False
        trace = gather_trace(self.trainer)
        if trace is not None:
            save_trace(trace, self.folder)

    def _restore(self, checkpoint: Checkpoint | None) -> list[ConfigChange]:
        """Load the checkpoint to resume from, or the initial weights; return what the config has changed since."""
        if checkpoint is None:
            if self.config.model.weights is not None:
                load_initial_weights(self.engine.stack, self.model, self.config.model.weights)
            return []
        self.trainer.restore(checkpoint)
        return find_changes(checkpoint.manifest.run_info.config, self.config)

    def _find_unfinished(self) -> _Unfinished:
        """Look into the folder for what is missing. The first rank has the folder; all do what it finds missing."""
        trainer = self.trainer
        is_evaluated = not (trainer.step and self._policy.is_evaluation_due(trainer)) or has_evaluation(
            self.folder.log, trainer.step
        )
        missing = [self.world.is_rank_zero and not is_there for is_there in (self.folder.is_finished, is_evaluated)]
        return _Unfinished(*map(bool, self.world.all_reduce([float(is_missing) for is_missing in missing])))

    def _lock_folder(self) -> FolderLock | None:
        with self.folder.writing():
            self.folder.path.mkdir(parents=True, exist_ok=True)
            self.folder.log.touch()
            # Without save.to, the lock of the checkpoints is in this folder already.
            return None if self.config.save.to is None else FolderLock(self.folder.path)

    def _write_files(self) -> None:
        if not self.trainer.is_done:
            # The weights of a run that was meant to be shorter must not pass for this one's.
            with self.folder.writing():
                self.folder.weights.unlink(missing_ok=True)
        for name, content in {CONFIG: dump_config(self.config).encode(), **self._files}.items():
            self.folder.write(name, content)
