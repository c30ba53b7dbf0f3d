"""train_and_show: train a run, with a live view in a terminal and plain lines elsewhere."""

import os
from collections import deque
from contextlib import suppress

from rich.console import Console
from rich.live import Live

from stretto.base.task import target_name
from stretto.base.units import format_loss, format_seconds, pluralize
from stretto.checkpoint.background_save import SaveReport
from stretto.cli.views.console import make_console
from stretto.cli.views.live_view import LiveView
from stretto.config.idle_settings import idle_settings
from stretto.engine.build import stage_parts
from stretto.train.events import EvaluationReport, Event
from stretto.train.naive_scores import NaiveScores
from stretto.train.plan_check import PlanReport
from stretto.train.rank_monitor import RankReport
from stretto.train.run import Run
from stretto.train.straggler import StragglerReport
from stretto.train.trainer import StepReport
from stretto.windows.batches import Batches
from stretto.windows.items import SlidingWindows

_REFRESH_PER_SECOND = 4  # often enough to look live; drawing takes a millisecond or two
_PLAN_TOLERANCE = 0.15  # a measured step time within this fraction of the prediction counts as "as planned"


def train_and_show(run: Run) -> None:
    """Train to the end and show the progress."""
    console = make_console(is_quiet=not run.world.is_rank_zero)
    _print_run_summary(console, run)
    if run.is_finished:
        console.print(f"already done, at step {run.trainer.step:,}: {_output_locations(run)}")
        return
    try:
        if not run.world.is_rank_zero:
            # The events drive the training: consume them, and show nothing.
            deque(run.events(), maxlen=0)
        elif console.is_terminal:
            _show_live(console, run)
        else:
            _show_lines(console, run)
    except KeyboardInterrupt as interrupt:
        # Of the same class: it says whether this rank has left the others waiting.
        raise type(interrupt)(f" at step {run.trainer.step}: {_resume_hint(run)}") from None
    if run.trainer.skipped:
        console.print(f"skipped {pluralize(run.trainer.skipped, 'step')} with a loss or gradient that was not finite")
    if run.trainer.has_stopped_early:
        console.print(_describe_early_stop(run))
    if run.world.is_rank_zero:
        _print_naive_loss(console, run)
    console.print(f"done: {_output_locations(run)}")


def _print_naive_loss(console: Console, run: Run) -> None:
    """Print the validation loss of a naive forecast, if the run forecasts from sliding windows."""
    items = run.valid.items if isinstance(run.valid, Batches) else None
    naive = NaiveScores.of(items, run.config.model) if isinstance(items, SlidingWindows) else None
    if naive is not None and naive.loss is not None:
        console.print(f"for comparison, {naive.name} has validation loss {naive.loss:.4f}")


def _describe_early_stop(run: Run) -> str:
    improvement = run.trainer.improvement
    evaluations = pluralize(improvement.num_since, "evaluation")
    comparison = "lower" if run.metrics.mode == "min" else "higher"
    text = f"stopped early: {evaluations} without a {comparison} validation {improvement.name.replace('_', ' ')}"
    if improvement.best is None:  # none was finite
        return text
    name = f" ({run.folder}@best)" if run.config.save.keep_best else ""
    return f"{text} than the {improvement.best:.4f} of step {improvement.best_step}{name}"


def _output_locations(run: Run) -> str:
    if run.config.save.to is None:
        return f"config, log, checkpoints and weights are in {run.folder}"
    return f"config, log and weights are in {run.folder}, checkpoints in {run.config.save.to}"


def _resume_hint(run: Run) -> str:
    """Return a hint about the step from which an interrupted run would resume."""
    step = run.checkpoints.last_step
    if step is None:
        return "no checkpoint was saved; the next launch starts from scratch"
    return f"start it again to resume from step {step}"


def _announce_save() -> None:
    # Not print: the handler of the signal may interrupt another write to stderr.
    with suppress(OSError):
        os.write(2, b"\nstretto: saving after this step; press Ctrl-C again to leave at once, without saving\n")


def _show_lines(console: Console, run: Run) -> None:
    recent: list[StepReport] = []
    for event in run.events(on_first_interrupt=_announce_save):
        _print_event(console, run, event)
        if isinstance(event, StepReport):
            recent.append(event)
        elif isinstance(event, RankReport):
            # Reported every run.log_every steps, and after the last step.
            percentage = f" ({run.trainer.progress:.0%})" if run.trainer.num_steps is None else ""
            figures = _format_figures(recent, event, target_name(run.data_spec.task.targets))
            console.print(f"step {event.step}{_step_total(run)}{percentage}  {figures}")
            recent.clear()


def _show_live(console: Console, run: Run) -> None:
    trainer = run.trainer
    view = LiveView(
        trainer.num_steps,
        target_name(run.data_spec.task.targets),
        step=trainer.step,
        progress=trainer.progress,
        restarts=run.checkpoints.num_launches - 1,
    )
    with Live(view, console=console, refresh_per_second=_REFRESH_PER_SECOND, vertical_overflow="crop"):
        try:
            for event in run.events(view.update_evaluation_progress, _announce_save):
                view.update(event, trainer.progress)
                _print_event(console, run, event)
        finally:
            view.end()


def _print_event(console: Console, run: Run, event: Event) -> None:
    """Print a save, spike, straggler, plan check or evaluation on its own line; ignore other events."""
    match event:
        case SaveReport():
            line = _describe_save(event)
        case StepReport(rewound_to=int()):
            line = _describe_rewind(event)
        case StragglerReport():
            line = _describe_straggler(event)
        case PlanReport():
            line = f"plan    {_compare_with_plan(event)}"
        case EvaluationReport():
            line = f"step {event.step}{_step_total(run)}  validation: {event.evaluation}"
        case _:
            return
    # In a terminal rich wraps the line between words; elsewhere `soft_wrap` keeps it whole.
    console.print(line, soft_wrap=not console.is_terminal)


def _step_total(run: Run) -> str:
    return "" if run.trainer.num_steps is None else f"/{run.trainer.num_steps}"


def _compare_with_plan(report: PlanReport) -> str:
    """Return the planned and the measured step time as text, with what to do if they differ."""
    planned = format_seconds(report.planned)
    source = f"predicted {planned} per step" if report.tried is None else f"{planned} per step in the trial"
    times = f"{source}, measured {format_seconds(report.measured)}"
    if abs(report.ratio - 1) <= _PLAN_TOLERANCE:
        return f"{times}: as planned"
    hint = "something else may be using the machine; " if report.ratio > 2 else ""
    return f"{times}: {report.ratio:.2f} times as long as planned; {hint}measure again with `stretto profile RUN.toml`"


def _describe_save(report: SaveReport) -> str:
    if report.error is None:
        return f"saved step {report.step}: {report.num_bytes / 1e6:,.1f} MB in {report.seconds:.1f} s"
    return f"warning: step {report.step} was not saved: {report.error}; training continues"


def _describe_rewind(report: StepReport) -> str:
    assert report.rewound_to is not None
    return (
        f"warning: step {report.step} has a spike: loss {format_loss(report.loss)}; back to the weights of step "
        f"{report.rewound_to}, and {pluralize(report.step - report.rewound_to, 'window')} skipped"
    )


def _describe_straggler(report: StragglerReport) -> str:
    node = "; most ranks of its node are slow too" if report.whole_node else ""
    seconds = format_seconds(report.seconds)
    return (
        f"warning: rank {report.rank} is a straggler since step {report.since}: it takes {seconds} "
        f"({report.percent:.0f} %) more per step than the others with the same blocks{node}"
    )


def _print_run_summary(console: Console, run: Run) -> None:
    config = run.config
    num_weights = sum(parameter.numel() for parameter in run.model.parameters())
    names = " > ".join(type(block).__name__ for block in run.model)
    console.print(f"model   {num_weights:,} weights: {names}")
    console.print(f"data    {config.data.source}, {run.trainer.windows}")
    if run.data_spec.channels is not None:
        scales = {"standard": "(value - mean) / std of the training data", "none": "as they are"}
        console.print(f"scale   {config.data.scale}: channels are {scales[config.data.scale]} (data.scale)")
    if config.layout.num_ranks > 1:
        stages = " | ".join(f"{part.start}-{part.stop - 1}" for part in stage_parts(run.model, config.layout))
        console.print(f"layout  {config.layout.name}, blocks {stages}")
    steps = run.trainer.num_steps
    length = pluralize(config.train.epochs, "epoch") if steps is None else pluralize(steps, "step")
    backend = ", strict backend" if run.world.is_strict else ""
    uses_tf32 = config.run.tf32 and config.run.precision == "fp32" and run.world.device.type == "cuda"
    precision = "fp32 with TF32" if uses_tf32 else config.run.precision
    console.print(f"run     {length} on {run.world.device}{backend}, {precision}, in {run.folder}")
    if steps is not None and steps < config.train.warmup:
        warmup = f"train.warmup={config.train.warmup} exceeds the number of steps"
        console.print(f"hint    {warmup}, so the learning rate stays below its peak, as in a short trial")
    if config.run.tf32 and not uses_tf32:
        console.print("hint    run.tf32 has no effect: TF32 is for fp32 on NVIDIA GPUs")
    for sentence in idle_settings(config):
        console.print(f"hint    {sentence}", soft_wrap=not console.is_terminal)
    if run.world.device.type == "cpu":
        if config.run.precision == "fp16":
            console.print("hint    fp16 is emulated on CPUs and slow; use bf16 or fp32 (run.precision)")
        _print_load_hint(console)
    if run.resumed is not None:
        manifest = run.resumed.manifest
        console.print(f"resume  after step {manifest.training_state.step:,}, from {run.resumed.location}")
        console.print(f"        saved with {manifest.run_info.layout or pluralize(manifest.num_ranks, 'rank')}")
        for change in run.changes:
            console.print(f"changed {change}")


def _print_load_hint(console: Console) -> None:
    """Say what to do if other processes keep the cores busy: torch's threads wait for each other in every operation."""
    load, num_cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > num_cores > 1 and "OMP_NUM_THREADS" not in os.environ:
        console.print(f"hint    {num_cores} cores, load {load:.1f}: if training is slow, set OMP_NUM_THREADS=1")


def _format_figures(recent: list[StepReport], ranks: RankReport, target_name: str) -> str:
    last = recent[-1]
    speed = sum(report.num_targets for report in recent) / sum(report.seconds for report in recent)
    padding = sum(report.padding for report in recent) / len(recent)
    parts = [f"loss {format_loss(last.loss) if last.num_targets else '-'}", f"{speed:,.0f} {target_name}/s"]
    if last.skipped:
        parts.append(f"{last.skipped} skipped")
    parts += [f"norm {last.gradient_norm:.3g}", f"lr {last.learning_rate:.2e}"]
    if padding >= 0.005:  # less would be shown as 0%
        parts.append(f"padding {padding:.0%}")
    if len(ranks.busy) > 1:
        parts.append(f"bubble {ranks.bubble:.0%}")
    if ranks.straggler is not None:
        parts.append(f"straggler rank {ranks.straggler.rank} (+{format_seconds(ranks.straggler.seconds)})")
    return "  ".join(parts)
