"""The layouts of a plan as columns of a table, for the terminal and for HTML pages."""

from collections import Counter
from collections.abc import Sequence

from stretto.base.units import format_bytes, format_seconds
from stretto.config.layout import Layout
from stretto.plan.predict import Prediction
from stretto.plan.search import Plan


def listed_predictions(plan: Plan, max_rows: int | None = None) -> list[Prediction]:
    """Return the predictions to list: every layout that was tried, and the best others.

    The layout in the config and the best on one device are always among them, to compare with.
    """
    shown = list(plan.best if max_rows is None else plan.best[: max(max_rows, len(plan.trials))])
    for prediction in (plan.configured, plan.single_device):
        if prediction is not None and all(each.layout != prediction.layout for each in shown):
            shown.append(prediction)
    return shown


def layout_columns(plan: Plan, predictions: Sequence[Prediction]) -> dict[str, list[str]]:
    """Return the cells of each column by its header. What is not called measured is predicted."""
    columns = {"layout": layout_labels(plan, predictions)}
    columns["predicted step"] = [format_seconds(prediction.seconds) for prediction in predictions]
    if plan.trials:
        columns["measured step"] = [_measured_step(plan, prediction.layout) for prediction in predictions]
    columns["predicted speed-up"] = [f"{plan.speed_up(prediction):.2f}" for prediction in predictions]
    single = plan.measured_seconds(plan.single_device.layout)
    if single is not None:
        seconds = [plan.measured_seconds(prediction.layout) for prediction in predictions]
        columns["measured speed-up"] = ["-" if value is None else f"{single / value:.2f}" for value in seconds]
    columns["tokens/s"] = [f"{prediction.tokens_per_second:,.0f}" for prediction in predictions]
    columns["bubble"] = [f"{each.bubble:.0%}" if len(each.stages) > 1 else "-" for each in predictions]
    columns["memory"] = [format_bytes(prediction.memory) for prediction in predictions]
    columns["sent/rank"] = [format_bytes(each.traffic) if each.layout.num_ranks > 1 else "-" for each in predictions]
    return columns


def layout_labels(plan: Plan, predictions: Sequence[Prediction]) -> list[str]:
    """Return the layouts in short, with `blocks` only if two of them differ in nothing else."""
    counts = Counter(prediction.layout.name for prediction in predictions)
    return [_label(plan, prediction, counts[prediction.layout.name] > 1) for prediction in predictions]


def _label(plan: Plan, prediction: Prediction, has_blocks: bool) -> str:
    label = str(prediction.layout) if has_blocks else prediction.layout.name
    if prediction.layout == plan.single_device.layout:
        return label if plan.fits_single_device else f"{label} (does not fit)"
    is_configured = plan.configured is not None and prediction.layout == plan.configured.layout
    return f"{label} (in the config)" if is_configured else label


def _measured_step(plan: Plan, layout: Layout) -> str:
    seconds = plan.measured_seconds(layout)
    if seconds is not None:
        return format_seconds(seconds)
    return "failed" if any(trial.layout == layout for trial in plan.trials) else "-"
