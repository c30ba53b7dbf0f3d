"""Evaluation: the loss and other scores over one epoch of a dataset."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stretto.base.errors import DataError
from stretto.base.position import Position
from stretto.base.state import State
from stretto.base.task import TargetKind, target_name
from stretto.blocks.check_widths import check_inputs
from stretto.engine.engine import Engine, OnOutputs
from stretto.train.metrics.class_table import ClassTable
from stretto.train.metrics.metric_totals import Metrics, MetricTotals, metrics_by_name
from stretto.train.metrics.row_metric import check_row_metrics
from stretto.train.row_loss_check import check_row_loss
from stretto.train.stride_check import check_window_stride
from stretto.windows.loader import WindowSource, read_ahead

# Windows between two checks for an interruption. Each check is an all_reduce over all ranks.
_WINDOWS_PER_CHECK = 16

OnWindow = Callable[[float], None]
"""Called after each window with the fraction of the epoch that is done."""


@dataclass(frozen=True)
class Evaluation:
    """The mean loss over all targets, and other scores: accuracy, perplexity, bits per byte."""

    total: float  # the loss summed over targets, in nats for tokens and labels
    num_targets: int  # tokens, labels or values
    bytes_per_token: float | None = None  # None if the data is not text
    target_kind: TargetKind = "next_token"  # as in `Task.targets`
    num_correct: int | None = None  # how many predictions were right; None if the loss does not count them
    weight: float | None = None  # of all targets; None if each has weight 1
    metrics: Mapping[str, float] = field(default_factory=dict)  # the results of `evaluate(metrics=...)`, by name
    class_table: ClassTable | None = None  # of the metric `per_class`

    def __str__(self) -> str:
        scores = "".join(f"  {name.replace('_', ' ')} {value:,.4f}" for name, value in self.scores.items())
        return f"loss {self.loss:.4f}{scores}  ({self.num_targets:,} {target_name(self.target_kind)})"

    def __repr__(self) -> str:
        return f"Evaluation({self})"

    @property
    def scores(self) -> dict[str, float]:
        """Perplexity for tokens, bits per byte for text, accuracy if the loss counts correct predictions, and metrics.

        A mean with class weights is no perplexity.
        """
        is_text = self.target_kind == "next_token" and self.weight in (None, self.num_targets)
        values = {
            "perplexity": self.perplexity if is_text else None,
            "bits_per_byte": self.bits_per_byte if is_text else None,
            "accuracy": self.accuracy,
        }
        return {**{name: value for name, value in values.items() if value is not None}, **self.metrics}

    @property
    def loss(self) -> float:
        return self.total / (self.num_targets if self.weight is None else self.weight)

    @property
    def perplexity(self) -> float:
        # exp() overflows above 709. Such a model has no useful perplexity; infinity prints better than an error.
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def accuracy(self) -> float | None:
        """The fraction of predictions that were right; None if the loss does not count them."""
        return None if self.num_correct is None else self.num_correct / self.num_targets

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits per byte of the original text; None if the data is not text."""
        return None if self.bytes_per_token is None else self.loss / math.log(2) / self.bytes_per_token


class EvaluationInterruptedError(Exception):
    """An evaluation was stopped early, on all ranks."""


def evaluate(
    engine: Engine,
    windows: WindowSource,
    *,
    workers: int = 0,
    on_window: OnWindow = lambda fraction: None,
    is_interrupted: Callable[[], bool] | None = None,
    metrics: Metrics = (),
    class_names: Sequence[str] = (),
) -> Evaluation:
    """Return the loss and other scores over one epoch of `windows`, without dropout.

    `windows` is the data of all replicas, the same on every rank; each replica reads its share. `on_window` is called
    after each window with the fraction that is done. `is_interrupted` is called every 16 windows: if it returns true on
    any rank, all ranks raise EvaluationInterruptedError.

    `metrics` are built-in names (`accuracy`, `f1`, `per_class`, `mae`, `entity_f1`; for a sequence of symbols per row
    `error_rate`, `word_error_rate`, `character_error_rate`), or a dict by name of built-in names, functions
    `(outputs, targets) -> (sum, count)` and objects of torchmetrics. Every target counts once, in any layout.
    `class_names` are for the rows of `per_class`, the tags of `entity_f1` and the text of symbols.
    """
    world, task = engine.mesh.world, windows.task
    check_row_loss(engine.row_loss, task, is_stateful=windows.is_stateful, stride=engine.stride)
    check_window_stride(windows, engine.stride)
    metric_totals = MetricTotals(metrics, task, world.device, class_names)
    check_row_metrics(
        metrics_by_name(metrics),
        class_names,
        has_whole_rows=engine.has_whole_rows,
        is_stateful=windows.is_stateful,
    )
    # Metrics need the whole outputs, which no rank has if the output layer is split; so they are not always asked for.
    on_outputs = metric_totals.add if metrics else None
    sums = _run_epoch(engine, windows, workers, on_window, is_interrupted, on_outputs)
    total, num_targets, weight, num_correct, num_judged, *metric_sums = world.sum_over_ranks(
        torch.cat([sums, metric_totals.sums])
    )
    if not num_targets:
        raise DataError("the data has no targets, so there is nothing to evaluate; use other data")
    if not weight:
        raise DataError(
            "all targets of the data have weight 0, so there is nothing to evaluate; set class_weights above 0 for them"
        )
    # If a user's loss counts correct predictions in only some of its calls, there is no accuracy.
    correct = int(num_correct) if num_judged == num_targets else None
    results = metric_totals.results(metric_sums, world)
    return Evaluation(
        total,
        int(num_targets),
        windows.bytes_per_token,
        task.targets,
        correct,
        weight,
        {name: value for name, value in results.items() if not isinstance(value, ClassTable)},
        next((value for value in results.values() if isinstance(value, ClassTable)), None),
    )


def _run_epoch(
    engine: Engine,
    windows: WindowSource,
    workers: int,
    on_window: OnWindow,
    is_interrupted: Callable[[], bool] | None,
    on_outputs: OnOutputs | None,
) -> Tensor:
    """Run all windows of this rank's share; return its sums.

    They are of the loss, the targets, their weights, correct predictions, and how many targets these cover.
    """
    mesh = engine.mesh
    check_inputs(engine.model_input, windows.task)
    share = windows.share(mesh.replica, mesh.num_replicas, engine.num_micro_batches)
    state: State | None = None
    sums = torch.zeros(5, dtype=torch.float64, device=mesh.world.device)
    reader = read_ahead(
        share,
        Position(),
        inputs=engine.reads_inputs,
        targets=engine.reads_targets,
        workers=workers,
        pin=mesh.world.device.type != "cpu",
    )
    for number, (window, next_position) in enumerate(reader):
        is_check_due = number % _WINDOWS_PER_CHECK == 0
        if is_interrupted is not None and is_check_due and any(mesh.world.all_reduce([float(is_interrupted())])):
            raise EvaluationInterruptedError
        # A fixed key, so that evaluations are repeatable.
        result = engine.eval_step(window, state, key=0, on_outputs=on_outputs)
        state = result.state
        parts = [result.total, result.count, result.count if result.weight is None else result.weight]
        parts += [] if result.num_correct is None else [result.num_correct, result.count]
        sums[: len(parts)] += torch.stack([part.double() for part in parts])
        is_last = next_position.epoch > 0
        on_window(1.0 if is_last else share.fraction(next_position))
        if is_last:
            break
    return sums
