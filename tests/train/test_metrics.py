"""Metrics in any layout equal those computed by hand on all predictions; mistakes end in one sentence."""

import warnings
from collections.abc import Mapping

import numpy as np
import pytest
import torch
import torchmetrics
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score
from torchmetrics.functional.classification import multiclass_auroc

from helpers.rank_pool import RankPools
from helpers.short_params import some_short
from stretto import Evaluation, Layout, World, evaluate, make_engine
from stretto.base.task import TargetKind, has_classes
from stretto.base.window import Rows
from stretto.data import Batches, from_arrays
from stretto.errors import ConfigError
from stretto.nn import LSTM, CrossEntropy, Linear, QuantileLoss, SquaredError, Stack, initialize
from stretto.testing import LocalEngine
from stretto.train.metrics.class_table import ClassTable
from stretto.train.metrics.metric_totals import MetricTotals

NUM_ROWS, NUM_CLASSES, NUM_VALUES = 43, 4, 2
LAYOUTS = (Layout(), Layout(stages=2, chunks=3), Layout(replicas=2, micro_batches=2), Layout(replicas=2, stages=2))
LENGTHS = np.random.default_rng(1).integers(1, 12, NUM_ROWS)
KINDS: tuple[TargetKind, ...] = ("class_per_row", "class_per_step", "values_per_row", "values_per_step")


def inputs() -> list[NDArray[np.float64]]:
    draw = np.random.default_rng(2)
    return [draw.normal(size=(length, 3)) for length in LENGTHS]


def targets(kind: TargetKind, *, is_missing_in_part: bool = False) -> list[NDArray[np.generic]]:
    """Targets of one kind, about a tenth of them missing; class 3 never occurs."""
    draw = np.random.default_rng(3)
    rows: list[NDArray[np.generic]] = []
    for length in LENGTHS:
        size = int(length) if kind.endswith("per_step") else 1
        is_missing = draw.random(size) < 0.1
        if has_classes(kind):
            row: NDArray[np.generic] = np.where(is_missing, -100, draw.integers(0, NUM_CLASSES - 1, size))
        else:
            row = np.where(is_missing[:, None], np.nan, draw.normal(size=(size, NUM_VALUES)))
            if is_missing_in_part:
                row[draw.random(size) < 0.3, 0] = np.nan
        rows.append(row if kind.endswith("per_step") else row[0])
    return rows


def batches(kind: TargetKind, **options: bool) -> Batches:
    rows = targets(kind, **options)
    classes = NUM_CLASSES if has_classes(kind) else None
    dense = rows if kind.endswith("per_step") else np.stack(rows)
    return Batches(from_arrays(inputs(), dense, target_kind=kind, classes=classes), budget=40, row_multiple=1)


def model(kind: TargetKind) -> Stack:
    num_outputs = NUM_CLASSES if has_classes(kind) else NUM_VALUES
    return Stack([LSTM(3, 8), LSTM(8, 8), Linear(8, num_outputs)]).double()


def smape(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric percentage error of the values that are not missing."""
    errors = 2 * (outputs - targets).abs() / (outputs.abs() + targets.abs())
    return errors.nansum(), (~errors.isnan()).sum()


def top_two(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """How often the target is among the two highest outputs."""
    is_among = (outputs.topk(2).indices == targets[:, None]).any(dim=1)
    return is_among.sum(), len(targets)


class FlatPearson(torchmetrics.PearsonCorrCoef):
    """The correlation of all values; its states are not sums."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds.flatten(), target.flatten())


def all_metrics(kind: TargetKind) -> Mapping[str, object]:
    if has_classes(kind):
        return {
            "accuracy": "accuracy",
            "f1": "f1",
            "per_class": "per_class",
            "top_two": top_two,
            "torch_f1": MulticlassF1Score(NUM_CLASSES, average="macro"),
            "auroc": MulticlassAUROC(NUM_CLASSES, average="weighted"),  # keeps all outputs, in lists
        }
    pearson, mae = FlatPearson(), torchmetrics.MeanAbsoluteError().set_dtype(torch.float64)
    return {"mae": "mae", "smape": smape, "torch_mae": mae, "pearson": pearson}


def evaluate_on_rank(world: World | None, kind: TargetKind, layout: Layout) -> Evaluation:
    loss = CrossEntropy() if has_classes(kind) else SquaredError()
    engine = make_engine(model(kind), loss, layout, world, seed=1)
    metrics = all_metrics(kind)
    first = evaluate(engine, batches(kind), metrics=metrics)
    assert evaluate(engine, batches(kind), metrics=metrics) == first, "metrics can be used again"
    return first


def predictions(kind: TargetKind, **options: bool) -> tuple[Tensor, Tensor]:
    """The outputs and targets of all time steps that have a target, from one row at a time."""
    stack = initialize(model(kind), 1)
    outputs, kept_targets = [], []
    for row, target in zip(inputs(), targets(kind, **options), strict=True):
        with torch.no_grad():
            y, _ = stack(torch.tensor(row)[:, None], stack.initial_state(Rows.of(1, dtype=torch.float64)))
        y = y[:, 0] if kind.endswith("per_step") else y[-1:, 0]
        expected = torch.as_tensor(target if kind.endswith("per_step") else np.asarray(target)[None])
        is_present = expected != -100 if has_classes(kind) else ~expected.isnan().all(dim=1)
        outputs.append(y[is_present])
        kept_targets.append(expected[is_present])
    return torch.cat(outputs), torch.cat(kept_targets)


def table_by_hand(y: Tensor, expected: Tensor) -> list[tuple[float, float, float, int]]:
    """Precision, recall, F1 and support of each class."""
    rows, predicted = [], y.argmax(dim=1)
    for label in range(NUM_CLASSES):
        num_correct = int(((predicted == label) & (expected == label)).sum())
        num_predicted, support = int((predicted == label).sum()), int((expected == label).sum())
        precision, recall = num_correct / max(num_predicted, 1), num_correct / max(support, 1)
        rows.append((precision, recall, 2 * num_correct / max(num_predicted + support, 1), support))
    return rows


def metrics_by_hand(kind: TargetKind, y: Tensor, expected: Tensor) -> dict[str, float]:
    if not has_classes(kind):
        errors = (y - expected).abs()
        mae, percentage = float(errors.mean()), float((2 * errors / (y.abs() + expected.abs())).mean())
        correlation = np.corrcoef(y.flatten().numpy(), expected.flatten().numpy())[0, 1]
        return {"mae": mae, "smape": percentage, "torch_mae": mae, "pearson": float(correlation)}
    predicted, occurring = y.argmax(dim=1), set(expected.tolist()) | set(y.argmax(dim=1).tolist())
    f1 = float(np.mean([row[2] for label, row in enumerate(table_by_hand(y, expected)) if label in occurring]))
    num_higher = (y > y.gather(1, expected[:, None])).sum(dim=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one class never occurs
        auroc = multiclass_auroc(y.softmax(dim=1), expected, NUM_CLASSES, average="weighted")
    return {
        "accuracy": float((predicted == expected).double().mean()),
        "f1": f1,
        "top_two": float((num_higher < 2).double().mean()),
        "torch_f1": f1,
        "auroc": float(auroc),
    }


@pytest.mark.long
@pytest.mark.parametrize("kind", some_short(KINDS, 2))
def test_metrics_in_any_layout_equal_those_computed_by_hand(kind: TargetKind, pools: RankPools) -> None:
    y, expected = predictions(kind)
    for layout in LAYOUTS:
        is_single = layout.num_ranks == 1
        ranks = (
            [evaluate_on_rank(None, kind, layout)]
            if is_single
            else pools[layout.num_ranks].run(evaluate_on_rank, kind, layout)
        )
        for evaluation in ranks:
            assert evaluation.metrics == pytest.approx(metrics_by_hand(kind, y, expected), rel=1e-6), layout
            if has_classes(kind):
                assert evaluation.class_table is not None
                rows = [(row.precision, row.recall, row.f1, row.support) for row in evaluation.class_table]
                assert rows == table_by_hand(y, expected), layout
                assert evaluation.metrics["accuracy"] == evaluation.accuracy, "that of the loss"


def message_on_rank(world: World) -> str:
    engine = make_engine(model("class_per_row"), CrossEntropy(), Layout(stages=2), world, seed=1)
    with pytest.raises(ConfigError) as error:
        evaluate(engine, batches("class_per_row"), metrics={"x": MulticlassF1Score(NUM_CLASSES, average="none")})
    return str(error.value)


def test_a_metric_that_can_not_be_computed_is_the_same_error_on_every_rank(pools: RankPools) -> None:
    first, second = pools[2].run(message_on_rank)
    assert first == second
    assert first.startswith("metrics['x'] computed a Tensor of shape [4], not one number")


def local(kind: TargetKind) -> LocalEngine:
    return LocalEngine(initialize(model(kind), 1), CrossEntropy() if has_classes(kind) else SquaredError())


def test_values_that_are_missing_in_part_count_where_they_are_present() -> None:
    data = batches("values_per_step", is_missing_in_part=True)
    evaluation = evaluate(local("values_per_step"), data, metrics={"mae": "mae", "smape": smape})
    whole = evaluate(local("values_per_step"), batches("values_per_step"), metrics=["mae"])
    assert evaluation.num_targets < whole.num_targets
    outputs, expected = predictions("values_per_step", is_missing_in_part=True)
    assert evaluation.metrics["mae"] == pytest.approx(float((outputs - expected).abs().nanmean()), rel=1e-9)
    with pytest.raises(ConfigError, match=r"got a time step with some values missing, .* write a function"):
        evaluate(local("values_per_step"), data, metrics={"mae": torchmetrics.MeanAbsoluteError()})


def test_what_the_loss_ignores_does_not_count_in_metrics() -> None:
    engine = LocalEngine(initialize(model("class_per_step"), 1), CrossEntropy(ignore_index=1))
    table = evaluate(engine, batches("class_per_step"), metrics=["per_class"], class_names="abcd").class_table
    assert table is not None
    assert [row.name for row in table] == [*"abcd"]
    assert table.classes[1].support == 0 < table.classes[0].support


def test_metrics_without_targets_are_nan_and_negative_targets_are_missing() -> None:
    task = batches("class_per_step").task
    metrics = {name: metric for name, metric in all_metrics("class_per_step").items() if name != "per_class"}
    totals = MetricTotals(metrics, task, torch.device("cpu"))
    totals.add(torch.zeros(2, 1, NUM_CLASSES), torch.full((2, 1), -1))
    results = totals.results(totals.sums.tolist(), World(rank=0, size=1, device=torch.device("cpu")))
    assert results.keys() == metrics.keys() and all(
        isinstance(value, float) and np.isnan(value) for value in results.values()
    )
    with pytest.raises(ConfigError, match="class_names has 2 names, but the data has 4 classes"):
        MetricTotals(metrics, task, torch.device("cpu"), class_names=["a", "b"])


def test_metrics_are_shown_with_the_scores() -> None:
    evaluation = evaluate(local("class_per_row"), batches("class_per_row"), metrics={"macro": "f1"})
    assert list(evaluation.scores) == ["accuracy", "macro"]
    assert f"macro {evaluation.metrics['macro']:.4f}" in str(evaluation)


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == targets).double().mean()


def mean_and_count(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return mean(outputs, targets), len(targets)


@pytest.mark.parametrize(
    ("kind", "metrics", "message"),
    [
        (
            "class_per_row",
            ["f2"],
            r"metrics\['f2'\]='f2' is not a built-in metric; choose from accuracy, f1, per_class, mae",
        ),
        ("class_per_row", ["mae"], "is for values, but the data's targets are class_per_row; use accuracy, f1 or"),
        ("values_per_row", ["f1"], "is for classes, but the data's targets are values_per_row; use mae, or a function"),
        ("class_per_row", {"loss": mean}, "can't have the name 'loss', which an evaluation uses; rename it"),
        ("class_per_row", {"x": 3}, r"metrics\['x'\] is an object of type int; use a built-in name"),
        (
            "class_per_row",
            {"x": mean},
            r"metrics\['x'\] returned a Tensor of shape \[\]; return two numbers",
        ),
        ("class_per_row", {"x": mean_and_count}, "is not a sum: two parts of the data give .* and not a mean"),
        (
            "class_per_row",
            {"x": smape},
            r"failed on outputs \[\d+, 4\] and targets \[\d+\] \(RuntimeError: ",
        ),
        ("class_per_row", {"x": torchmetrics.R2Score()}, r"metrics\['x'\] failed on outputs .* use a metric for such"),
        ("class_per_row", {"x": MulticlassF1Score(4, average="none")}, r"computed a Tensor of shape \[4\], not one"),
        ("class_per_row", {"x": MulticlassF1Score}, r"is a class; create it: MulticlassF1Score\(...\)"),
        ("class_per_row", {"x": MulticlassF1Score(4, sync_on_compute=False)}, "has sync_on_compute=False"),
        (
            "class_per_row",
            {"x": torchmetrics.MetricCollection([MulticlassF1Score(4)])},
            r"is a MetricCollection; pass its metrics: metrics=\{\*\*collection\}",
        ),
        ("values_per_row", {"x": torchmetrics.MinMaxMetric(torchmetrics.R2Score())}, "wraps other metrics"),
    ],
)
def test_a_mistake_is_one_sentence(kind: TargetKind, metrics: Mapping[str, object] | list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(local(kind), batches(kind), metrics=metrics)


def test_mae_needs_one_output_per_value() -> None:
    engine = LocalEngine(initialize(Stack([LSTM(3, 8), Linear(8, 6)]).double(), 1), QuantileLoss())
    with pytest.raises(ConfigError, match=r"mae needs an output for each value, not outputs \[6\] and targets \[2\]"):
        evaluate(engine, batches("values_per_row"), metrics=["mae"])


def test_a_class_table_prints_as_a_table() -> None:
    table = ClassTable.of([3, 0, 4, 0, 5, 1000], ["up", "downward"])
    assert str(table).splitlines() == [
        "class     precision  recall      F1  support",
        "up           0.7500  0.6000  0.6667        5",
        "downward     0.0000  0.0000  0.0000    1,000",
    ]
