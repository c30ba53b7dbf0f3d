"""Builds what a config describes (data, model, loss, engine) and checks it before ranks communicate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from stretto.base.errors import ConfigError, StrettoError
from stretto.base.reason import class_and_reason, short_reason
from stretto.base.task import Task, has_own_length
from stretto.blocks.adaptive_softmax import AdaptiveSoftmax
from stretto.blocks.crf import CRF
from stretto.blocks.ctc import CTCLoss
from stretto.blocks.loss_weights import attach_loss
from stretto.blocks.losses import (
    AbsoluteError,
    BinaryCrossEntropy,
    CrossEntropy,
    HuberLoss,
    Loss,
    QuantileLoss,
    SquaredError,
)
from stretto.blocks.network import build_network
from stretto.blocks.pointwise import Embedding, Linear
from stretto.blocks.row_loss import RowLoss
from stretto.blocks.row_summary import check_row_summary, find_unsummarized
from stretto.blocks.stack import Stack
from stretto.blocks.torch_losses import as_loss
from stretto.blocks.vocab_check import check_vocab_parallel
from stretto.config.layout import Layout
from stretto.config.model import ModelConfig
from stretto.config.run import DataConfig, RunConfig, RunSettings
from stretto.engine.build import check_spans, make_engine, stage_parts
from stretto.engine.pipeline import PipelineEngine
from stretto.engine.replica import ReplicaEngine
from stretto.engine.spans import no_lanes_error
from stretto.mesh.world import World
from stretto.plan.fit import fit_layout
from stretto.train.feed import Feed, open_feeds
from stretto.train.metrics.config_metrics import RunMetrics, load_metrics
from stretto.train.metrics.row_metric import check_row_metrics
from stretto.train.named_optimizer import check_optimizer
from stretto.train.row_loss_check import check_row_loss
from stretto.train.stride_check import check_window_stride
from stretto.train.user_code import load_object
from stretto.windows.loader import WindowSource


@dataclass(frozen=True)
class RunInputs:
    """A run's data for all ranks, its model on the meta device, and its loss: no device is needed to build them."""

    train: Feed
    valid: Feed | None
    model: Stack
    loss: Loss
    metrics: RunMetrics


def build_inputs(config: RunConfig, *, checks_files: bool = True, ranks_per_node: int | None = None) -> RunInputs:
    """Open a config's data and build its model and loss; check all that can be checked without a device.

    An invalid config raises the same error on every rank, or just once if a command calls this before launching ranks.
    `checks_files` is as in `Store.open`, `ranks_per_node` as in `open_feeds`.
    """
    train, valid = open_feeds(
        config.data, config.layout, config.run.seed, checks_files=checks_files, ranks_per_node=ranks_per_node
    )
    if valid is None and config.evaluation_dependent is not None:
        raise ConfigError(
            f"{config.evaluation_dependent} depends on evaluations during the run, but "
            f"data.factory={config.data.factory!r} returned no validation data; return a pair of rows or windows"
        )
    task = train.data_spec.task
    loss = build_loss(config.model, task, train.data_spec.labels)
    model = attach_loss(build_model(config.model, task), loss)
    row_loss = loss if isinstance(loss, RowLoss) else None
    check_row_loss(row_loss, task, is_stateful=train.windows.is_stateful, stride=model.stride)
    check_window_stride(train.windows, model.stride)
    if task.is_per_row:
        check_row_summary(find_unsummarized(model))
    check_layout(config.layout, model, loss, train.windows, config.data)
    check_optimizer(config.train, model)
    metrics = load_metrics(config.metrics, config.model, task, train.target_std)
    check_row_metrics(
        metrics.metrics,
        train.data_spec.labels,
        has_whole_rows=isinstance(loss, RowLoss) or config.layout.chunks * config.layout.spans == 1,
        is_stateful=train.windows.is_stateful,
    )
    return RunInputs(train, valid, model, loss, metrics)


def fit_to_ranks(config: RunConfig, num_ranks: int) -> RunConfig:
    """Return the config with its layout fitted to `num_ranks`, unless it is auto, is not elastic, or already fits."""
    layout = config.layout
    if layout.auto or not layout.elastic or layout.num_ranks == num_ranks:
        return config
    single_rank = layout.model_copy(
        update={"replicas": 1, "stages": 1, "spans": 1}
    )  # `open_feeds` checks the data against it
    train, _ = open_feeds(config.data, single_rank, config.run.seed)
    model = build_model(config.model, train.data_spec.task)
    # Lanes limit the layout: each micro-batch needs at least one. Batches don't: too small a share gets blank rows.
    num_rows = train.windows.lanes or num_ranks * layout.micro_batches
    num_blocks = len(model) - layout.vocab_parallel  # the last one belongs to all stages
    return config.model_copy(update={"layout": fit_layout(layout, num_ranks, num_blocks, num_rows)})


def build_model(config: ModelConfig, task: Task) -> Stack:
    """Return the model that a config describes, on the meta device, as no rank has to hold all of it."""
    try:
        with torch.device("meta"):
            if config.factory is None:
                return build_network(config, task)
            factory = load_object("model.factory", config.factory)
            model = factory(task) if callable(factory) else factory
    except StrettoError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises
        reason = class_and_reason(error)
        if config.factory is None:
            raise ConfigError(f"the model can't be built ({reason}); change the [model] section") from None
        problem = f"model.factory={config.factory!r} failed ({reason})"
        raise ConfigError(f"{problem}; fix the function, which is called with a stretto.data.Task") from None
    if not isinstance(model, Stack):
        raise ConfigError(
            f"model.factory={config.factory!r} gives an object of type {type(model).__name__}; name a function that "
            "returns a stretto.nn.Stack"
        )
    _check_input_and_output_sizes(model, config, task)
    return model


def build_loss(config: ModelConfig, task: Task, labels: Sequence[str] = ()) -> Loss:
    """Return the loss that a config names; by default, the usual one for the task's targets. `labels` name classes."""
    has_classes = task.has_classes
    if config.has_own_loss:
        assert config.loss is not None
        try:
            return as_loss(cast(Loss, load_object("model.loss", config.loss)))
        except ConfigError as error:
            raise ConfigError(f"model.loss={config.loss!r}: {error}") from None
    has_sequences = has_own_length(task.targets)
    name = config.loss or ("ctc" if has_sequences else "cross_entropy" if has_classes else "mse")
    for field in ("class_weights", "label_smoothing"):
        if getattr(config, field) and not has_classes:
            raise ConfigError(f"model.{field} needs classes, but the data's targets are values; leave it out")
    _check_loss_name(name, task)
    losses: dict[str, Callable[[], Loss]] = {
        "cross_entropy": lambda: CrossEntropy(_class_weights(config, task, labels), config.label_smoothing),
        "adaptive_softmax": lambda: AdaptiveSoftmax(config.output_size, task.num_outputs, config.adaptive_cutoffs),
        "crf": lambda: CRF(task.num_outputs),
        "ctc": CTCLoss,
        "binary_cross_entropy": BinaryCrossEntropy,
        "mse": SquaredError,
        "mae": AbsoluteError,
        "huber": lambda: HuberLoss(config.huber_delta),
        "quantile": lambda: QuantileLoss(config.quantiles),
    }
    with torch.device("meta"):  # as the model's weights, those of a loss are drawn later
        return losses[name]()


def _check_loss_name(name: str, task: Task) -> None:
    """Raise if a loss can't be computed from the data's targets."""
    kind, choices = "values", ["mse", "mae", "huber", "quantile"]
    if has_own_length(task.targets):
        kind, choices = "a sequence of classes per row", ["ctc"]
    elif task.has_classes:
        kind = "classes per time step" if task.targets == "class_per_step" else "classes"
        choices = ["cross_entropy", "adaptive_softmax", *(["crf"] if task.targets == "class_per_step" else [])]
    fits = name in choices or (name == "binary_cross_entropy" and kind == "values")
    if not fits:
        listed = " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
        raise ConfigError(f"model.loss={name!r} does not fit the data, whose targets are {kind}; use {listed}")


def _class_weights(config: ModelConfig, task: Task, labels: Sequence[str]) -> tuple[float, ...]:
    if config.class_weights and len(config.class_weights) != task.num_outputs:
        names = ", ".join(map(repr, labels[:10])) + (", ..." if len(labels) > 10 else "")
        order = f" in this order: {names}" if labels else ""
        raise ConfigError(
            f"model.class_weights has {len(config.class_weights)} numbers, but the data has {task.num_outputs} "
            f"classes; give one weight per class{order}"
        )
    return config.class_weights


def build_engine(
    inputs: RunInputs, layout: Layout, settings: RunSettings, world: World
) -> PipelineEngine | ReplicaEngine:
    """Return this rank's engine. The initial weights depend on the seed and the modules' names, not on the layout."""
    try:
        return make_engine(inputs.model, inputs.loss, layout, world, seed=settings.seed, precision=settings.precision)
    except (MemoryError, torch.OutOfMemoryError) as error:
        num_weights = sum(parameter.numel() for parameter in inputs.model.parameters())
        reason = short_reason(error) if str(error) else "out of memory"
        raise ConfigError(
            f"the model's {num_weights:,} weights can't be allocated ({reason}); use a smaller model or more stages"
        ) from None


def check_layout(layout: Layout, model: Stack, loss: Loss, windows: WindowSource, data: DataConfig) -> None:
    """Raise if the layout can't split the model into stages or a window into chunks, or the model can't use lanes."""
    if layout.splits_vocab:
        check_vocab_parallel(model, loss, layout.stages)
    stage_parts(model, layout)  # raises if the blocks can't be split
    if layout.spans > 1:
        check_spans(model, layout)
    if not windows.is_stateful:
        return
    if not model.causal:
        raise ConfigError(
            "the model has a block that looks ahead in time (causal=False), but lanes carry state from window to "
            "window; use causal blocks"
        )
    if layout.spans > 1:
        raise no_lanes_error(layout.spans)
    if layout.chunks > data.window:
        raise ConfigError(f"layout.chunks={layout.chunks} exceeds data.window={data.window}; use fewer chunks")


def _check_input_and_output_sizes(model: Stack, config: ModelConfig, task: Task) -> None:
    """Raise if a user's model has too few inputs or outputs for the data; torch's own error would be unclear."""
    factory, first, last = f"model.factory={config.factory!r}", model[0], model[len(model) - 1]
    if isinstance(first, Embedding) and task.inputs == "tokens" and first.num_tokens < task.num_inputs:
        raise ConfigError(
            f"{factory} begins with an Embedding of {first.num_tokens} tokens, but the data's vocabulary has "
            f"{task.num_inputs}; use task.num_inputs"
        )
    # Cross-entropy needs an output per class. Losses of values report wrong shapes themselves.
    needs_classes = not config.has_own_loss and task.has_classes
    if isinstance(last, Linear) and needs_classes and last.num_outputs < task.num_outputs:
        raise ConfigError(
            f"{factory} ends with a Linear that has {last.num_outputs} outputs, but the data needs {task.num_outputs}; "
            "use task.num_outputs"
        )
