"""What a person sees: progress bars in a terminal, plain lines elsewhere."""

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import TaskID, TextColumn
from rich.table import Table

from stretto.cli.bars import make_bars, percentage
from stretto.cli.console import make_console

if TYPE_CHECKING:
    from stretto.checkpoint.checkpoints import SaveReport
    from stretto.data.parts import Progress as PrepareProgress
    from stretto.measure.verify import Verification
    from stretto.train.planned import PlanReport
    from stretto.train.run import Run
    from stretto.train.trained import TrainedModel
    from stretto.train.trainer import StepReport


class PrepareView:
    """A bar for each phase of a preparation."""

    def __init__(self, console: Console) -> None:
        self._bars = make_bars(console, percentage())
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, progress: "PrepareProgress") -> None:
        if progress.phase not in self._tasks:
            self._tasks[progress.phase] = self._bars.add_task(progress.phase, total=progress.total)
        self._bars.update(self._tasks[progress.phase], completed=progress.done)


def show_run(run: "Run") -> None:
    """Train to the end, with progress."""
    console = make_console(is_quiet=not run.world.is_first)
    _say_what_will_run(console, run)
    if run.is_finished:
        console.print(f"done already, at step {run.trainer.step:,}: {_what_is_where(run)}")
        return
    try:
        _show_events(console, run)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f" at step {run.trainer.step}: {_what_is_left(run)}") from None
    if run.trainer.skipped:
        console.print(f"skipped {run.trainer.skipped:,} steps whose numbers were not finite")
    console.print(f"done: {_what_is_where(run)}")


def _what_is_where(run: "Run") -> str:
    if run.config.save.to is None:
        return f"config, log, checkpoints and weights are in {run.folder}"
    return f"config, log and weights are in {run.folder}, checkpoints in {run.config.save.to}"


def _what_is_left(run: "Run") -> str:
    """What becomes of a run that was interrupted."""
    step = run.checkpoints.last_step
    if step is None:
        return "no step was saved; it starts from the beginning when it is started again"
    return f"it goes on from step {step} when it is started again"


def _show_events(console: Console, run: "Run") -> None:
    from stretto.checkpoint.checkpoints import SaveReport
    from stretto.train.planned import PlanReport
    from stretto.train.ranks import RanksReport
    from stretto.train.trainer import StepReport

    of_all = "" if run.trainer.num_steps is None else f"/{run.trainer.num_steps}"
    recent: list[StepReport] = []
    with make_bars(console, percentage(), TextColumn("{task.fields[figures]}")) as bars:
        training = bars.add_task("training", total=1.0, figures="")
        evaluating = bars.add_task("evaluating", total=1.0, figures="", visible=False)
        for event in run.events(lambda part: bars.update(evaluating, completed=part, visible=True)):
            if isinstance(event, SaveReport):
                _show_save(console, event)
                continue
            if isinstance(event, PlanReport):
                console.print(f"plan    {_compare(event)}")
                continue
            if isinstance(event, RanksReport):
                continue
            if not isinstance(event, StepReport):
                bars.update(evaluating, visible=False)
                console.print(f"step {event.step}{of_all}  held out: {event.evaluation}")
                continue
            recent.append(event)
            is_due = event.step % run.config.run.log_every == 0 or run.trainer.is_done
            is_narrow = console.is_terminal and console.width < 110
            figures = _figures(recent, run.subject.task.asks, is_narrow)
            bars.update(training, completed=run.trainer.progress, figures=f"step {event.step}{of_all}  {figures}")
            if is_due and not console.is_terminal:
                part = "" if of_all else f" ({run.trainer.progress:.0%})"
                console.print(f"step {event.step}{of_all}{part}  {figures}")
            if is_due:
                recent.clear()


def _compare(report: "PlanReport") -> str:
    """How a plan and what came of it compare."""
    found = f"predicted {report.predicted:.3g} s a step, measured {report.measured:.3g} s"
    if abs(report.ratio - 1) <= 0.15:
        return f"{found}: as planned"
    much = (
        f"{report.ratio:.2f} times as long as planned" if report.ratio > 1 else f"{1 / report.ratio:.2f} times as fast"
    )
    other = "something else may be using the machine, or " if report.ratio > 2 else ""
    return f"{found}: {much}; {other}measure again with `stretto profile RUN.toml`"


def _show_save(console: Console, report: "SaveReport") -> None:
    if report.error is None:
        console.print(f"saved step {report.step}: {report.num_bytes / 1e6:,.1f} MB in {report.seconds:.1f} s")
    else:
        console.print(f"warning: step {report.step} was not saved: {report.error}; the run goes on")


def show_evaluation(trained: "TrainedModel", data: Path | str) -> None:
    """Evaluate with progress, and print the scores: as a table in a terminal, as a line elsewhere."""
    console = make_console()
    if not console.is_terminal:
        console.print(f"evaluating {data} ...")
    with make_bars(console, percentage()) as bars:
        task = bars.add_task("evaluating", total=1.0)
        evaluation = trained.evaluate(data, lambda part: bars.update(task, completed=part))
    if not console.is_terminal:
        console.print(f"{data}: {evaluation}")
        return
    table = Table("figure", "value", title=str(data))
    table.add_row("loss", f"{evaluation.loss:.4f}")
    for name, value in evaluation.scores.items():
        table.add_row(name.replace("_", " "), f"{value:,.4f}")
    table.add_row(evaluation.asks, f"{evaluation.tokens:,}")
    console.print(table)


def verification_table(found: "Verification") -> Table:
    """Return the largest differences, block by block."""
    title = f"{found.num_steps} steps, largest relative difference from one rank (tolerance {found.tolerance:.0e})"
    table = Table("block", "kind", "gradients", "state", "", title=title)
    for block in found.blocks:
        mark = "ok" if block.worst <= found.tolerance else "differs"
        table.add_row(str(block.index), block.name, f"{block.gradients:.1e}", f"{block.state:.1e}", mark)
    table.add_row("", "loss", f"{found.loss:.1e}", "", "ok" if found.loss <= found.tolerance else "differs")
    return table


def _say_what_will_run(console: Console, run: "Run") -> None:
    from stretto.engine.build import stage_parts

    config = run.config
    num_weights = sum(parameter.numel() for parameter in run.model.parameters())
    names = " > ".join(type(block).__name__ for block in run.model)
    console.print(f"model   {num_weights:,} weights: {names}")
    console.print(f"data    {config.data.train}, {run.trainer.data}")
    if config.layout.num_ranks > 1:
        stages = " | ".join(f"{part.start}-{part.stop - 1}" for part in stage_parts(run.model, config.layout))
        console.print(f"layout  {config.layout}, blocks {stages}")
    where = f"{run.world.device}, {config.run.precision}"
    steps = run.trainer.num_steps
    length = f"{config.train.epochs} epoch{'s' * (config.train.epochs > 1)}" if steps is None else f"{steps:,} steps"
    console.print(f"run     {length} on {where}, in {run.folder}")
    if run.resumed is not None:
        manifest = run.resumed.manifest
        console.print(f"resume  after step {manifest.facts.step:,}, from {run.resumed.where}")
        console.print(f"        saved by {manifest.about.layout or f'{manifest.num_ranks} ranks'}")
        for change in run.changes:
            console.print(f"changed {change}")


def _figures(recent: "list[StepReport]", asks: str, is_narrow: bool) -> str:
    last = recent[-1]
    speed = sum(report.tokens for report in recent) / sum(report.seconds for report in recent)
    loss = "-" if not last.tokens else f"{last.loss:.4f}" if last.loss < 1e4 else f"{last.loss:.3e}"
    most = f"loss {loss}  {speed:,.0f} {asks}/s"
    if last.skipped:
        most += f"  {last.skipped} skipped"
    return most if is_narrow else f"{most}  norm {last.gradient_norm:.2f}  lr {last.learning_rate:.2e}"
