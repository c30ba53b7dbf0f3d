"""A run from a config: its folder, its log, its checkpoints, its events from the first step to the saved weights."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TextIO

from safetensors.torch import save_file
from torch import Tensor

from stretto.base.errors import ConfigError, DivergedError, StrettoError
from stretto.base.run_folder import CONFIG, RunFolder
from stretto.blocks.stack import Stack
from stretto.checkpoint.checkpoint import Checkpoint, find_checkpoint, find_resume_checkpoint
from stretto.checkpoint.lock import FolderLock
from stretto.checkpoint.manager import CheckpointManager, SaveReport
from stretto.checkpoint.manifest import RunInfo
from stretto.checkpoint.storage import Storage, open_storage
from stretto.config.run import RunConfig
from stretto.config.toml import dump_config, load_config
from stretto.mesh.device import find_device
from stretto.mesh.world import World
from stretto.train.build import build_engine, validate_config
from stretto.train.config_changes import ConfigChange, find_changes, reject_incompatible_changes, reject_initial_weights
from stretto.train.data_spec import data_spec_files
from stretto.train.evaluate import Evaluation, EvaluationInterruptedError, OnWindow, evaluate
from stretto.train.feed import Feed
from stretto.train.initial_weights import check_initial_weights, load_initial_weights
from stretto.train.log import Log, has_evaluation, open_log, read_lines, write_line
from stretto.train.optimizer import averaged_weights
from stretto.train.plan_check import PlanCheck, PlanReport, predicted_seconds
from stretto.train.rank_monitor import RankMonitor, RankReport
from stretto.train.signals import on_preemption_signal
from stretto.train.sinks.sinks import Sinks, check_sinks, flatten, open_sinks
from stretto.train.trace import gather_trace, save_trace
from stretto.train.trained_model import check_weights, read_weights
from stretto.train.trainer import Request, StepReport, Trainer
from stretto.train.weights import save_weights

# Of the steps after a start, the one that is traced: by then all is warm.
_TRACED_STEP = 10


class PreemptedError(StrettoError):
    """The run was asked to leave; it has saved its last step, and goes on from there when it is started again."""

    exit_code = 75


@dataclass(frozen=True)
class EvaluationReport:
    """The held-out loss after some steps."""

    step: int
    evaluation: Evaluation


Event = StepReport | RankReport | EvaluationReport | SaveReport | PlanReport


class Run:
    """A run that is ready to go, or to go on: everything it needs was found and fits together.

    `for event in run.events(): ...` trains, evaluates, saves and logs. With several ranks each has a Run of its own,
    and all of them must go through the events; the first rank writes config, log and weights. `resume` is `auto` (go
    on from the newest checkpoint in the folder), `never`, or the path of a checkpoint.
    """

    def __init__(self, config: RunConfig, world: World | None = None, resume: str = "auto") -> None:
        self.config = config
        self.world = world or World(0, 1, find_device(config.run.device))
        self.folder = RunFolder(config.run.folder)
        self.model, train, valid = prepare_run(config, resume)
        self.data_spec = train.data_spec
        self.engine = build_engine(self.model, config, train.data_spec.task, self.world)
        self.valid = None if valid is None else valid.windows
        self.trainer = Trainer(
            self.engine,
            train.windows,
            config.train,
            seed=config.run.seed,
            workers=config.data.workers,
        )
        self._files = data_spec_files(self.data_spec)
        self._run_info = RunInfo(config=config.model_dump(mode="json"), layout=str(config.layout), data=train.digest)
        save = config.save
        self.checkpoints = CheckpointManager(
            _location(config),
            self.world,
            keep=save.keep,
            keep_every=save.keep_every,
            keep_best=save.keep_best,
            retry_seconds=config.data.retry_seconds,
        )
        self._lock: FolderLock | None = None
        if self.world.is_rank_zero:
            self._create_folder()
        self.changes: list[ConfigChange] = []
        try:
            self.resumed = self.checkpoints.start(resume)
            if self.resumed is not None:
                self._resume_from(self.resumed)
            elif config.model.weights is not None:
                load_initial_weights(self.engine.stack, self.model, config.model.weights)
            # The first rank has the folder; all do what it finds left to do there.
            found = [
                float(self.world.is_rank_zero and what) for what in (self._lacks_weights(), self._lacks_evaluation())
            ]
            self._is_weights_pending, self._is_evaluation_pending = (bool(sum) for sum in self.world.all_reduce(found))
        except BaseException:
            self.close()
            raise
        self._last_save_time = time.monotonic()

    @property
    def is_finished(self) -> bool:
        """Has an earlier start of this run done all there is to do?"""
        return self.trainer.is_done and not self._is_weights_pending and not self._is_evaluation_pending

    def close(self) -> None:
        """Let go of the run's folder; `events` does so at its end."""
        self.checkpoints.close(wait=False)
        if self._lock is not None:
            self._lock.release()

    def events(self, on_window: OnWindow = lambda part: None) -> Iterator[Event]:
        """Train to the end; `on_window` is told how far an evaluation is."""
        try:
            with self.checkpoints, on_preemption_signal(lambda: self.trainer.request(Request.STOP)):
                if not self.world.is_rank_zero:
                    yield from self._events(None, on_window)
                    return
                with closing(self._open_folder()) as file, self._open_sinks() as sinks:
                    log = Log(file, sinks)
                    write_line(log, "start", self._start_line())
                    yield from self._events(log, on_window)
        finally:
            self.close()

    def _events(self, log: Log | None, on_window: OnWindow) -> Iterator[Event]:
        # What an earlier start has left, if it was cut off right after a save.
        if self.trainer.is_done and self._is_weights_pending:
            self._save_weights()
        if self._is_evaluation_pending:
            yield from self._evaluate(self.trainer.step, log, on_window)
        plan = PlanCheck(predicted_seconds(self.folder, self.config.layout) if self.world.is_rank_zero else None)
        first, ranks = self.trainer.step + 1, RankMonitor(self.engine)
        self.trainer.is_recording = True
        for report in self._steps():
            write_line(log, "step", asdict(report))
            yield report
            is_asked_to_leave = Request.STOP in self.trainer.agreed
            is_last = self.trainer.is_done or is_asked_to_leave
            ranks.add(report)
            if is_last or report.step % self.config.run.log_every == 0:
                yield from self._rank_reports(ranks, log)
            if self.trainer.is_recording and (is_last or report.step - first + 1 == _TRACED_STEP):
                self._trace()
            compared = plan.add_step(report.step, report.seconds, is_last=self.trainer.is_done)
            if compared is not None:
                write_line(log, "plan", asdict(compared))
                yield compared
            if self._is_save_due(report.step) or is_last:
                # What is saved now is safe whatever the evaluation meets.
                self._save(wait=is_last)
            if self.trainer.is_done:
                self._save_weights()
            yield from self._save_reports(log)
            if is_asked_to_leave and not self.trainer.is_done:
                self._barrier()
                raise PreemptedError(
                    f"left after step {report.step}, as asked: it is saved, and the run goes on from there"
                )
            if self._is_evaluation_due(report.step):
                yield from self._evaluate(report.step, log, on_window)
            self._request_save_if_due()
        self._barrier()
        yield from self._save_reports(log)

    def _barrier(self) -> None:
        """All are done before one goes: the first rank may keep the store that the others still read."""
        self.world.barrier()

    def _steps(self) -> Iterator[StepReport]:
        try:
            yield from self.trainer
        except DivergedError as error:
            raise DivergedError(f"{error}; {self._save_nonfinite_batch()}") from None

    def _rank_reports(self, ranks: RankMonitor, log: Log | None) -> Iterator[RankReport]:
        """What all ranks say of their last steps, on the first of them."""
        found = ranks.gather()
        if found is not None:
            write_line(log, "ranks", asdict(found))
            yield found

    def _trace(self) -> None:
        """Write what all ranks did in the last step; once in a start is enough."""
        self.trainer.is_recording = False
        trace = gather_trace(self.trainer)
        if trace is not None:
            save_trace(trace, self.folder)

    def _evaluate(self, step: int, log: Log | None, on_window: OnWindow) -> Iterator[EvaluationReport]:
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
        figures = {"loss": evaluation.loss, "tokens": evaluation.tokens, **evaluation.scores}
        write_line(log, "evaluation", {"step": step, **figures})
        self.checkpoints.record_loss(step, evaluation.loss)
        yield EvaluationReport(step, evaluation)

    def _resume_from(self, saved: Checkpoint) -> None:
        run_info = saved.manifest.run_info
        self.changes = [] if run_info.config is None else find_changes(run_info.config, self.config)
        self.trainer.restore(saved)

    def _save(self, *, wait: bool) -> None:
        snapshot = self.trainer.snapshot()
        self.checkpoints.save(replace(snapshot, run_info=self._run_info, files=self._files), wait=wait)
        self._last_save_time = time.monotonic()

    def _save_reports(self, log: Log | None) -> Iterator[SaveReport]:
        """What has become of saves since this was asked last."""
        while (report := self.checkpoints.poll()) is not None:
            write_line(log, "save", asdict(report))
            yield report

    def _request_save_if_due(self) -> None:
        """The clock of the first rank decides for all, which learn of it after the next step."""
        minutes = self.config.save.minutes
        if minutes and self.world.is_rank_zero and time.monotonic() - self._last_save_time > 60 * minutes:
            self.trainer.request(Request.SAVE)

    def _is_save_due(self, step: int) -> bool:
        save = self.config.save
        is_due = save.every is not None and step % save.every == 0
        is_for_best = save.keep_best and self._is_evaluation_due(step)
        return is_due or is_for_best or Request.SAVE in self.trainer.agreed

    def _is_evaluation_due(self, step: int) -> bool:
        every = self.config.run.eval_every
        if self.valid is None:
            return False
        return self.trainer.is_done or (every is not None and step % every == 0)

    def _save_weights(self) -> None:
        """Put the weights of all stages into one file, from the checkpoint that was just saved."""
        if self.world.is_rank_zero:
            self.checkpoints.check_fence()
            saved = find_checkpoint(self.checkpoints.location, self.config.data.retry_seconds)
            save_weights(read_weights(self.model, saved), self.folder.weights)

    def _save_nonfinite_batch(self) -> str:
        """Save this rank's share of the window that went wrong, and the states it started from; say where."""
        trainer = self.trainer
        assert trainer.window is not None
        path = self.folder.nonfinite_batch(trainer.step + 1, self.world.rank)
        window = {name: value for name, value in asdict(trainer.window).items() if isinstance(value, Tensor)}
        states = {f"state.{index}": tensor for index, tensor in enumerate(trainer.state or ())}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Copies: safetensors refuses views that share their memory.
            save_file({name: value.cpu().clone().contiguous() for name, value in {**window, **states}.items()}, path)
        except OSError as error:
            return f"the batch can't be kept in {path} ({error.strerror})"
        return f"the batch is in {path}"

    def _start_line(self) -> dict[str, object]:
        return {
            "step": self.trainer.step,
            "generation": self.checkpoints.generation,
            "resumed_from": None if self.resumed is None else self.resumed.location,
            "ranks": self.world.size,
            "layout": str(self.config.layout),
            "changes": [str(change) for change in self.changes],
        }

    def _lacks_weights(self) -> bool:
        return not self.folder.is_finished

    def _lacks_evaluation(self) -> bool:
        """Was the run cut off between the save of this step and its evaluation?"""
        step = self.trainer.step
        return step > 0 and self._is_evaluation_due(step) and not has_evaluation(self.folder.log, step)

    def _create_folder(self) -> None:
        with self.folder.writing():
            self.folder.path.mkdir(parents=True, exist_ok=True)
            self.folder.log.touch()
            if self.config.save.to is not None:
                # Else the checkpoints' own lock is in the same place.
                self._lock = FolderLock(self.folder.path)

    def _open_folder(self) -> TextIO:
        """Write what the run's folder begins with; return its log."""
        with self.folder.writing():
            if not self.trainer.is_done:
                # Of a run that was meant to be shorter; they would pass for this one's.
                self.folder.weights.unlink(missing_ok=True)
            files = {CONFIG: dump_config(self.config).encode(), **self._files}
            for name, content in files.items():
                self.folder.write(name, content)
            return open_log(self.folder.log, self.trainer.step)

    def _open_sinks(self) -> Sinks:
        hyperparameters = flatten(self.config.model_dump(mode="json", exclude_none=True))
        path = self.folder.log
        num_bytes = path.stat().st_size
        return open_sinks(
            self.config.watch,
            self.folder.path,
            step=self.trainer.step,
            hyperparameters=hyperparameters,
            history=lambda: read_lines(path, num_bytes),
        )


def prepare_run(config: RunConfig, resume: str = "auto") -> tuple[Stack, Feed, Feed | None]:
    """Check that a run can start, as `validate_config` does, and that what it goes on from is of the same run."""
    folder = RunFolder(config.run.folder)
    if resume == "never" and folder.config.exists():
        raise ConfigError(f"run.folder={folder} holds a run already; choose another --run.folder, or delete it")
    _check_checkpoint_location(config)
    check_sinks(config.watch)
    fitting = validate_config(config)
    saved = find_resume_checkpoint(_storage(config), resume, config.data.retry_seconds)
    if saved is not None:
        run_info = saved.manifest.run_info
        if run_info.config is not None:
            changes = find_changes(run_info.config, config)
            reject_incompatible_changes(changes, saved.location)
            reject_initial_weights(changes, saved.location)
        if run_info.data not in (None, fitting[1].digest):
            raise ConfigError(
                f"data.train={config.data.train} is not the data that {saved.location} was trained on, so its place in it "
                "means nothing; give the same data, or choose another --run.folder"
            )
        check_weights(fitting[0], saved)
    elif config.model.weights is not None:
        check_initial_weights(fitting[0], config.model.weights)
    return fitting


def _check_checkpoint_location(config: RunConfig) -> None:
    """Refuse a run whose checkpoints are elsewhere than they were: it would begin again without a word."""
    path = RunFolder(config.run.folder).config
    before = load_config(path).save.to if path.is_file() else config.save.to
    if before != config.save.to:
        place = "its own folder" if before is None else before
        remedy = "leave save.to out" if before is None else f"give --save.to {before}"
        raise ConfigError(
            f"run.folder={config.run.folder} holds a run with its checkpoints in {place}, not in "
            f"{config.save.to or 'its own folder'}; {remedy}, or choose another --run.folder"
        )


def newest_checkpoint(config: RunConfig) -> str | None:
    """Return the name of the newest checkpoint of a run; none if there is none, or it can't be found out now."""
    try:
        saved = find_resume_checkpoint(_storage(config), "auto", config.data.retry_seconds)
    except (StrettoError, OSError):
        return None
    return None if saved is None else saved.name


def _location(config: RunConfig) -> str:
    return config.save.to or str(RunFolder(config.run.folder).checkpoints)


def _storage(config: RunConfig) -> Storage:
    return open_storage(_location(config), config.data.retry_seconds)
