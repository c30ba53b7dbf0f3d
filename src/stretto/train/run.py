"""A run from a config: its folder, its log, its checkpoints, its events from the first step to the saved weights."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

from safetensors.torch import save_file

from stretto.base.errors import ConfigError, DivergedError, StrettoError
from stretto.blocks.stack import Stack
from stretto.checkpoint.checkpoints import Checkpoints, SaveReport
from stretto.checkpoint.manifest import About
from stretto.checkpoint.saved import CHECKPOINTS, NoCheckpointError, Saved, find_saved
from stretto.config.run import RunConfig
from stretto.config.toml import dump_config
from stretto.mesh.device import find_device
from stretto.mesh.world import World
from stretto.train.build import build_engine, check_fits
from stretto.train.changes import Change, find_changes, refuse_changes
from stretto.train.evaluate import Evaluation, GivenUpError, OnWindow, evaluate
from stretto.train.feed import Feed
from stretto.train.log import open_log, write_line
from stretto.train.optimizer import averaged_weights
from stretto.train.signals import when_asked_to_leave
from stretto.train.subject import subject_files
from stretto.train.trained import CONFIG, WEIGHTS, read_weights
from stretto.train.trainer import StepReport, Trainer, Wish
from stretto.train.weights import save_weights

LOG = "log.jsonl"
NONFINITE = "nonfinite"


class LeftError(StrettoError):
    """The run was asked to leave; it has saved its last step, and goes on from there when it is started again."""

    exit_code = 75


@dataclass(frozen=True)
class EvaluationReport:
    """The held-out loss after some steps."""

    step: int
    evaluation: Evaluation


Event = StepReport | EvaluationReport | SaveReport


class Run:
    """A run that is ready to go, or to go on: everything it needs was found and fits together.

    `for event in run.events(): ...` trains, evaluates, saves and logs. With several ranks each has a Run of its own,
    and all of them must go through the events; the first rank writes config, log and weights. `resume` is `auto` (go
    on from the newest checkpoint in the folder), `never`, or the path of a checkpoint.
    """

    def __init__(self, config: RunConfig, world: World | None = None, resume: str = "auto") -> None:
        self.config = config
        self.world = world or World(0, 1, find_device(config.run.device))
        self.folder = config.run.folder
        self.model, train, valid = prepare_run(config, resume)
        self.subject = train.subject
        self.engine = build_engine(self.model, config, train.subject.task, self.world)
        share = (self.engine.mesh.replica, config.layout.replicas, config.layout.slices)
        self.valid = None if valid is None else valid.windows.share(*share)
        self.trainer = Trainer(
            self.engine,
            train.windows.share(*share),
            config.train,
            seed=config.run.seed,
            workers=config.data.workers,
        )
        self._about = About(config=config.model_dump(mode="json"), layout=str(config.layout), data=train.digest)
        save = config.save
        self.checkpoints = Checkpoints(
            _location(config),
            self.world,
            keep=save.keep,
            keep_every=save.keep_every,
            keep_best=save.keep_best,
            patience=config.data.patience,
        )
        if self.world.is_first:
            self._create_folder()
        self.resumed = self.checkpoints.start(resume)
        self.changes: list[Change] = []
        if self.resumed is not None:
            self._go_on_from(self.resumed)
        self._saved_time = time.monotonic()
        self._was_finished = False

    def events(self, on_window: OnWindow = lambda part: None) -> Iterator[Event]:
        """Train to the end; `on_window` is told how far an evaluation is."""
        # All ranks have looked at the folder when this is through; then the first may write.
        self._was_finished = self.is_finished
        self.engine.add_up([0.0])
        with self.checkpoints, when_asked_to_leave(lambda: self.trainer.wish(Wish.LEAVE)):
            if not self.world.is_first:
                yield from self._events(None, on_window)
                return
            if not self.trainer.is_done:
                # Of a run that was longer than it was meant to be; they would pass for its own.
                (self.folder / WEIGHTS).unlink(missing_ok=True)
            (self.folder / CONFIG).write_text(dump_config(self.config), encoding="utf-8")
            for name, content in subject_files(self.subject).items():
                (self.folder / name).write_bytes(content)
            with closing(open_log(self.folder / LOG, self.trainer.step)) as log:
                write_line(log, "start", self._start_line())
                yield from self._events(log, on_window)

    def _events(self, log: TextIO | None, on_window: OnWindow) -> Iterator[Event]:
        if self.trainer.is_done and not self._was_finished:
            yield from self._end(log, on_window)
        for report in self._steps():
            write_line(log, "step", asdict(report))
            yield report
            is_asked_to_leave = Wish.LEAVE in self.trainer.granted
            if self._is_save_due(report.step) or is_asked_to_leave or self.trainer.is_done:
                # What is saved now is safe whatever the evaluation meets.
                self._save(wait=is_asked_to_leave or self.trainer.is_done)
            if self.trainer.is_done:
                self._save_weights()
            yield from self._saves(log)
            if is_asked_to_leave and not self.trainer.is_done:
                raise LeftError(f"left after step {report.step}, as asked: it is saved, and the run goes on from there")
            if self._is_evaluation_due(report.step):
                yield from self._evaluate(report.step, log, on_window)
        yield from self._saves(log)

    @property
    def is_finished(self) -> bool:
        """Has this run taken all its steps, in an earlier start, and left its weights?"""
        return self.trainer.is_done and (self.folder / WEIGHTS).is_file()

    def _end(self, log: TextIO | None, on_window: OnWindow) -> Iterator[Event]:
        """What is left to do if an earlier start was killed after its last step was saved."""
        self._save_weights()
        yield from self._evaluate(self.trainer.step, log, on_window)

    def _steps(self) -> Iterator[StepReport]:
        try:
            for report in self.trainer:
                self._wish_for_a_save()
                yield report
        except DivergedError as error:
            raise DivergedError(f"{error}; the batch is in {self._keep_batch()}") from None

    def _evaluate(self, step: int, log: TextIO | None, on_window: OnWindow) -> Iterator[EvaluationReport]:
        if self.valid is None:
            return
        try:
            with averaged_weights(self.trainer.optimizer):
                evaluation = evaluate(
                    self.engine,
                    self.valid,
                    workers=self.config.data.workers,
                    on_window=on_window,
                    is_interrupted=lambda: self.trainer.is_wished(Wish.LEAVE),
                )
        except GivenUpError:
            return
        figures = {"loss": evaluation.loss, "tokens": evaluation.tokens, **evaluation.scores}
        write_line(log, "evaluation", {"step": step, **figures})
        self.checkpoints.judge(step, evaluation.loss)
        yield EvaluationReport(step, evaluation)

    def _go_on_from(self, saved: Saved) -> None:
        about = saved.manifest.about
        self.changes = find_changes(about.config or {}, self.config) if about.config else []
        self.trainer.restore(saved)

    def _save(self, *, wait: bool) -> None:
        snapshot = self.trainer.snapshot()
        self.checkpoints.save(replace(snapshot, about=self._about, files=subject_files(self.subject)), wait=wait)
        self._saved_time = time.monotonic()

    def _saves(self, log: TextIO | None) -> Iterator[SaveReport]:
        """What has become of saves since this was asked last."""
        while (report := self.checkpoints.poll()) is not None:
            write_line(log, "save", asdict(report))
            yield report

    def _wish_for_a_save(self) -> None:
        """The clock of the first rank decides for all, which learn of it after the next step."""
        minutes = self.config.save.minutes
        if minutes and self.world.is_first and time.monotonic() - self._saved_time > 60 * minutes:
            self.trainer.wish(Wish.SAVE)

    def _is_save_due(self, step: int) -> bool:
        save = self.config.save
        is_due = save.every is not None and step % save.every == 0
        is_for_best = save.keep_best and self._is_evaluation_due(step)
        return is_due or is_for_best or Wish.SAVE in self.trainer.granted

    def _is_evaluation_due(self, step: int) -> bool:
        every = self.config.run.eval_every
        if self.valid is None:
            return False
        return self.trainer.is_done or (every is not None and step % every == 0)

    def _save_weights(self) -> None:
        """Put the weights of all stages into one file, from the checkpoint that was just saved."""
        if self.world.is_first:
            self.checkpoints.check_fence()
            saved = find_saved(self.checkpoints.location, self.config.data.patience)
            save_weights(read_weights(self.model, saved), self.folder / WEIGHTS)

    def _keep_batch(self) -> Path:
        """Save this rank's share of the window that went wrong, and the states it started from, for study."""
        trainer = self.trainer
        assert trainer.window is not None
        path = self.folder / NONFINITE / f"step-{trainer.step + 1}-rank-{self.world.rank}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        window = asdict(trainer.window)
        tensors = {name: value.contiguous() for name, value in window.items() if hasattr(value, "contiguous")}
        tensors |= {f"state.{index}": tensor.cpu() for index, tensor in enumerate(trainer.state or ())}
        save_file(tensors, path)
        return path

    def _start_line(self) -> dict[str, object]:
        return {
            "step": self.trainer.step,
            "generation": self.checkpoints.generation,
            "from": None if self.resumed is None else self.resumed.where,
            "ranks": self.world.size,
            "layout": str(self.config.layout),
            "changes": [str(change) for change in self.changes],
        }

    def _create_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / LOG).touch()
        except OSError as error:
            raise ConfigError(f"run.folder={self.folder} can't be written ({error.strerror}); choose another") from None


def prepare_run(config: RunConfig, resume: str = "auto") -> tuple[Stack, Feed, Feed | None]:
    """Check that a run can start, as `check_fits` does, and that what it goes on from is of the same run."""
    folder = config.run.folder
    if resume == "never" and (folder / CONFIG).exists():
        raise ConfigError(f"run.folder={folder} holds a run already; choose another --run.folder, or delete it")
    fitting = check_fits(config)
    saved = _find(config, resume)
    if saved is not None:
        about = saved.manifest.about
        if about.config is not None:
            refuse_changes(find_changes(about.config, config), saved.where)
        if about.data not in (None, fitting[1].digest):
            raise ConfigError(
                f"data.train={config.data.train} is not the data that {saved.where} was trained on, so its place in it "
                "means nothing; give the same data, or choose another --run.folder"
            )
    return fitting


def _find(config: RunConfig, resume: str) -> Saved | None:
    """What a run would go on from, as far as can be said before it starts."""
    if resume == "never":
        return None
    if resume != "auto":
        return find_saved(resume, config.data.patience)
    try:
        return find_saved(_location(config), config.data.patience)
    except NoCheckpointError:
        return None


def newest_checkpoint(config: RunConfig) -> str | None:
    """Return the name of the newest checkpoint of a run; none if there is none, or it can't be found out now."""
    try:
        saved = _find(config, "auto")
    except (StrettoError, OSError):
        return None
    return None if saved is None else saved.name


def _location(config: RunConfig) -> str:
    return config.save.to or str(config.run.folder / CHECKPOINTS)
