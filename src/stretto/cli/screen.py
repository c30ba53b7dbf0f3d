"""What a person sees: progress bars in a terminal, plain lines elsewhere."""

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from stretto.data.prepare import Progress as PrepareProgress
    from stretto.train.evaluate import Evaluation
    from stretto.train.run import Run, TrainedModel
    from stretto.train.trainer import StepReport


def _bars(console: Console, *columns: TextColumn) -> Progress:
    """Bars that show only in a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class PrepareView:
    """A bar for each phase of a preparation."""

    def __init__(self, console: Console) -> None:
        self._bars = _bars(console, TextColumn("{task.percentage:>3.0f}%"))
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
    from stretto.train.trainer import StepReport

    console = Console(highlight=False, soft_wrap=True)
    _say_what_will_run(console, run)
    num_steps = run.trainer.num_steps
    recent: list[StepReport] = []
    with _bars(console, TextColumn("{task.completed}/{task.total}"), TextColumn("{task.fields[figures]}")) as bars:
        training = bars.add_task("training", total=num_steps, figures="")
        evaluating = bars.add_task("evaluating", total=None, figures="", visible=False)
        for event in run.events(lambda done, total: bars.update(evaluating, completed=done, total=total, visible=True)):
            if not isinstance(event, StepReport):
                bars.update(evaluating, visible=False)
                console.print(f"step {event.step}/{num_steps}  held out: {_scores(event.evaluation)}")
                continue
            recent.append(event)
            is_due = event.step % run.config.run.log_every == 0 or event.step == num_steps
            figures = _figures(recent)
            bars.update(training, completed=event.step, figures=figures)
            if is_due and not console.is_terminal:
                console.print(f"step {event.step}/{num_steps}  {figures}")
            if is_due:
                recent.clear()
    console.print(f"done: config, log and weights are in {run.folder}")


def show_evaluation(trained: "TrainedModel", data: Path) -> None:
    """Evaluate with progress, and print the scores as a table."""
    console = Console(highlight=False)
    with _bars(console, TextColumn("{task.completed}/{task.total}")) as bars:
        task = bars.add_task("evaluating", total=None)
        evaluation = trained.evaluate(data, lambda done, total: bars.update(task, completed=done, total=total))
    table = Table("figure", "value", title=f"held out: {data}")
    for name, value in (
        ("loss (nats a token)", f"{evaluation.loss:.4f}"),
        ("perplexity", f"{evaluation.perplexity:,.2f}"),
        ("bits per byte", f"{evaluation.bits_per_byte:.4f}"),
        ("tokens", f"{evaluation.tokens:,}"),
    ):
        table.add_row(name, value)
    console.print(table)


def _say_what_will_run(console: Console, run: "Run") -> None:
    config, engine = run.config, run.trainer.engine
    num_weights = sum(parameter.numel() for parameter in engine.stack.parameters())
    names = " > ".join(type(block).__name__ for block in engine.stack)
    console.print(f"model   {num_weights:,} weights: {names}")
    console.print(
        f"data    {config.data.train}, {config.data.lanes} lanes x window {config.data.window}, "
        f"{run.trainer.data.num_windows:,} windows an epoch"
    )
    console.print(
        f"run     {run.trainer.num_steps:,} steps on {engine.device}, {config.run.precision}, in {run.folder}"
    )


def _figures(recent: "list[StepReport]") -> str:
    last = recent[-1]
    speed = sum(report.tokens for report in recent) / sum(report.seconds for report in recent)
    return f"loss {last.loss:.4f}  {speed:,.0f} tokens/s  norm {last.gradient_norm:.2f}  lr {last.learning_rate:.2e}"


def _scores(evaluation: "Evaluation") -> str:
    return (
        f"loss {evaluation.loss:.4f}  perplexity {evaluation.perplexity:,.2f}  "
        f"bits per byte {evaluation.bits_per_byte:.4f}"
    )
