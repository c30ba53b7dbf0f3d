"""suggest: composes the TOML config of a first run for prepared data, with a comment on each setting.

In the code, "step" means a time step and "batch" a training step; the TOML comments say "time step" and "step".
"""

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stretto.base.bounded_read import parse_toml
from stretto.base.units import pluralize
from stretto.config.run import RunConfig
from stretto.config.toml import parse_config
from stretto.config.toml_comments import Setting, describe_field, format_commented_toml
from stretto.prepare.inspection import Inspection
from stretto.prepare.prepare_data import PreparedData
from stretto.prepare.series_schema import SeriesSchema
from stretto.store.corpus import Corpus
from stretto.store.sequences import Channels, Classes, Sequences, StoredTargets, TargetValues
from stretto.train.build import build_inputs
from stretto.train.forecast_choice import ForecastRequest, choose_forecast
from stretto.train.naive_forecast import Baseline
from stretto.windows.batches import Batches
from stretto.windows.items import SlidingWindows

# A first run should take at most about this many seconds.
_TARGET_SECONDS = 75
# Roughly how many floating-point operations per second training reaches, per core (of up to 4) or per accelerator.
_CORE_FLOPS_PER_SECOND = 40e9
_DEVICE_FLOPS_PER_SECOND = 10e12
# (layers, hidden), smallest first.
_MODEL_SIZES = ((1, 64), (1, 96), (1, 128), (1, 192), (1, 256), (2, 256), (2, 384), (2, 512), (2, 768), (3, 1024))
_TARGET_ROWS = 32  # per batch, roughly; an accelerator gets up to 64 lanes, and a forecast 64 windows
_MAX_ROW_STEPS = 512  # sequences of more than twice as many time steps, with a target at each, are cut
_MIN_BATCHES = 200  # per run, as far as _MAX_EPOCHS and _TARGET_SECONDS allow
_MAX_EPOCHS = 100


@dataclass(frozen=True)
class Suggestion:
    """A run that can be started as it is: the text of its TOML file, with comments, and the parsed config."""

    text: str
    config: RunConfig
    baseline: Baseline | None = None  # what a forecast should beat; None without validation data, and for other tasks
    notes: tuple[str, ...] = ()  # decisions that you may want to change


def suggest(
    inspection: Inspection,
    prepared: PreparedData,
    *,
    folder: Path | str = "runs/default",
    path: Path | str = "run.toml",
    horizon: int | None = None,
    season: int | None = None,
    context: int | None = None,
    targets: Sequence[str] = (),
) -> Suggestion:
    """Return a first run for data that `inspect_data` inspected and `prepare_data` prepared.

    Model and epochs are chosen so that training takes at most about a minute on this machine. `folder` becomes
    `run.folder`; `path`, which the header names, is where the text will be written. For a forecast, `horizon`,
    `season` and `context` are chosen from the data where not given; without `targets`, all channels are forecast.
    """
    train, valid = prepared.train, prepared.valid
    if isinstance(train, Corpus):
        data_settings = _lane_settings(train)
    elif isinstance(train.fields.values, Channels) and train.fields.targets is None:
        inspected = inspection.schema
        schema = inspected if isinstance(inspected, SeriesSchema) else SeriesSchema(train.fields.values.names)
        request = ForecastRequest(horizon, season, context, tuple(targets))
        data_settings = _forecast_settings(schema, train, valid, request)
    else:
        data_settings = _batch_settings(train)
    num_validation_steps = 0 if valid is None else _num_steps(valid) * data_settings.reads_per_step
    settings = [
        Setting("data.train", train.location, "made by `stretto init`"),
        *([Setting("data.valid", valid.location, "for validation: never trained on")] if valid is not None else []),
        *data_settings.settings,
        Setting("run.folder", str(folder), "for config, log, checkpoints and weights"),
        *_schedule_settings(data_settings, num_validation_steps),
    ]
    if _has_accelerator():
        settings.append(Setting("run.precision", "bf16", "fastest on accelerators; weights stay fp32"))
    header = (
        f"{data_settings.title}. `stretto init` wrote this file. Train with",
        f"  stretto train {shlex.quote(str(path))}",
        "`stretto train --help` explains every field. An option overrides a field: --train.lr 3e-4",
    )
    optional_fields = ("data.workers", "model.cell", *(["train.patience"] if valid is not None else []), "layout.auto")
    alternatives = [*data_settings.alternatives, *map(describe_field, optional_fields)]
    text = format_commented_toml(header, settings, alternatives)
    config = parse_config(parse_toml(text), "the suggested run")
    build_inputs(config)  # raises if the config does not fit the data
    return Suggestion(text, config, data_settings.baseline, data_settings.notes)


@dataclass(frozen=True)
class _DataSettings:
    """The settings that depend on the kind of data, and what the other settings are computed from."""

    title: str
    feed: str
    settings: tuple[Setting, ...]
    flops: float  # per step of one row, forward and backward
    num_steps: int  # per epoch, summed over rows
    batch_steps: int  # per global batch, summed over rows
    max_epochs: int  # for data that is not small
    reads_per_step: float = 1.0  # how many times an epoch reads each step of the data: sliding windows overlap
    alternatives: tuple[Setting, ...] = ()  # commented out
    baseline: Baseline | None = None
    notes: tuple[str, ...] = ()


def _lane_settings(corpus: Corpus) -> _DataSettings:
    num_tokens, num_symbols, level = corpus.num_tokens, len(corpus.vocabulary), corpus.vocabulary.level
    window = min(128 if _has_accelerator() else 64, max(1, num_tokens // 8))  # at least 8 windows per lane
    lanes = _floor_power_of_two(min(64 if _has_accelerator() else _TARGET_ROWS, num_tokens // (8 * window)))
    layers, hidden = _model_size(num_tokens, max_weights=num_tokens, num_inputs=num_symbols, num_outputs=num_symbols)
    settings = (
        Setting("data.lanes", lanes, f"parallel streams of {num_tokens // lanes:,} tokens each, with carried state"),
        Setting("data.window", window, f"time steps of backpropagation; a batch has {lanes * window:,} tokens"),
        *_model_settings(layers, hidden, num_tokens, 0.1),
    )
    flops = _flops(layers, hidden, hidden, num_symbols)
    title = f"A language model trained on {num_tokens:,} {level}s"
    return _DataSettings(title, "lanes", settings, flops, num_tokens, batch_steps=lanes * window, max_epochs=20)


def _batch_settings(sequences: Sequences) -> _DataSettings:
    targets, values = sequences.fields.targets, sequences.fields.values
    num_steps, mean_length, longest = sequences.num_steps, sequences.mean_length, sequences.longest
    context = _MAX_ROW_STEPS if targets is not None and targets.per_step and longest > 2 * _MAX_ROW_STEPS else None
    if context is not None:
        mean_length, longest = min(mean_length, context), context
    num_inputs = len(values.names) if isinstance(values, Channels) else values.num_tokens
    num_outputs = num_inputs if targets is None else len(targets.names)
    # 1.5 times the target, rounded down to a power of two, is 0.75 to 1.5 times the target. The longest row must fit.
    budget = max(_floor_power_of_two(round(_TARGET_ROWS * mean_length * 1.5)), math.ceil(longest / 256) * 256, 256)
    # Outputs that are computed once per row cost next to nothing.
    outputs_per_step = num_outputs if targets is None or targets.per_step or targets.own_length else 0
    layers, hidden = _model_size(num_steps, max_weights=num_steps, num_inputs=num_inputs, num_outputs=outputs_per_step)
    num_rows = _rows_per_batch(budget, mean_length)
    # If lengths differ, about a fifth of the budget is padding.
    batch_steps = round(0.8 * budget if longest > mean_length else num_rows * mean_length)
    settings = (
        Setting("data.budget", budget, f"time steps per batch: about {num_rows} rows of {mean_length:.0f} on average"),
        *([] if context is None else [Setting("data.context", context, "longer sequences are cut into several rows")]),
        *_scale_settings(sequences),
        *_model_settings(layers, hidden, num_steps, 0.3 if isinstance(targets, Classes) else 0.1),
    )
    flops = _flops(layers, hidden, min(num_inputs, hidden), outputs_per_step)
    title = f"{_model_kind(targets)} trained on {sequences.num_sequences:,} sequences"
    return _DataSettings(title, "batches", settings, flops, num_steps, batch_steps, max_epochs=10)


def _rows_per_batch(budget: int, length: float) -> int:
    """Return how many rows of a length `Batches` puts into a batch."""
    num_rows = max(1, int(budget / max(length, 1)))
    return num_rows if num_rows <= Batches.row_multiple else num_rows - num_rows % Batches.row_multiple


def _model_kind(targets: StoredTargets | None) -> str:
    if targets is None:
        return "A language model"
    per_step = " per time step" if targets.per_step else ""
    if targets.own_length:
        return f"A CTC model ({len(targets.names) - 1:,} symbols)"
    if isinstance(targets, Classes):
        return f"A classifier ({len(targets.names):,} classes{per_step})"
    return f"A regression model ({pluralize(len(targets.names), 'value')}{per_step})"


def _forecast_settings(
    schema: SeriesSchema, train: Sequences, valid: Sequences | Corpus | None, request: ForecastRequest
) -> _DataSettings:
    windows, note = choose_forecast(schema, train, valid, request)
    forecast, context = windows.forecast, windows.context
    num_inputs, num_outputs = forecast.task.num_inputs, forecast.task.num_outputs
    num_steps = sum(windows.shard_sizes) * context
    max_weights, budget = 4 * train.num_steps, 64 * context
    layers, hidden = _model_size(num_steps, max_weights, num_inputs, num_outputs)
    duration = ""
    if schema.seconds and forecast.horizon == schema.period:
        duration = f" ({_duration_text(schema.period * schema.seconds)})"
    settings = [
        Setting("data.context", context, "time steps that the network sees before it makes a forecast"),
        Setting("data.horizon", forecast.horizon, f"time steps ahead to forecast{duration}"),
    ]
    reason = "targets are differences from the value this many time steps earlier" if forecast.season else "no season"
    baseline = None
    if isinstance(valid, Sequences):
        baseline = Baseline.of(SlidingWindows(valid, forecast, context))
        reason += f"; {baseline}"
    settings.append(Setting("data.season", forecast.season, reason))
    if request.targets:
        settings.append(Setting("data.targets", list(request.targets), "the channels to forecast"))
    if schema.known_future:
        reason = "their values over the horizon are inputs, so a forecast needs them"
        settings.append(Setting("data.known_future", list(schema.known_future), reason))
    if schema.static:
        settings.append(Setting("data.static", list(schema.static), "constant within a series; inputs only"))
    if schema.has_missing:
        settings.append(Setting("data.masks", True, "some values are missing: the network gets a mask per channel"))
    settings += [
        _SCALE_SETTING,
        Setting("data.every_step", True, "train on a forecast at every time step of the context, not only at the last"),
        Setting("data.budget", budget, f"time steps per batch: {budget // context} windows of {context}"),
        *_model_settings(layers, hidden, train.num_steps, 0.5),
        Setting("train.weight_decay", 0.1, "series change over time, so overfitting is the main risk"),
    ]
    channels = pluralize(len(forecast.target_channels), "channel")
    steps = pluralize(forecast.horizon, "time step")
    return _DataSettings(
        title=f"A forecast of {channels}, {steps} ahead, from the last {context}",
        feed="forecast",
        settings=tuple(settings),
        flops=_flops(layers, hidden, num_inputs, num_outputs),
        num_steps=num_steps,
        batch_steps=budget,
        max_epochs=1,
        reads_per_step=num_steps / max(train.num_steps, 1),
        alternatives=(describe_field("data.stride"), _quantile_setting(baseline)),
        baseline=baseline,
        notes=() if note is None else (note,),
    )


def _quantile_setting(baseline: Baseline | None) -> Setting:
    reason = "in place of the squared error: predict quantiles of each value"
    if baseline is not None:
        reason += f"; the loss to compare with is then {baseline.quantile_loss:.4f}"
    return Setting("model.loss", "quantile", reason)


_SCALE_SETTING = Setting(
    "data.scale", "standard", "channels are (value - mean) / std of the training data; none: as they are"
)


def _scale_settings(sequences: Sequences) -> list[Setting]:
    scaled = ["channels"] if isinstance(sequences.fields.values, Channels) else []
    scaled += ["values to predict"] if isinstance(sequences.fields.targets, TargetValues) else []
    if scaled in ([], ["channels"]):
        return [_SCALE_SETTING] if scaled else []
    reason = f"{' and '.join(scaled)} are (value - mean) / std of the training data; none: as they are"
    return [Setting("data.scale", "standard", reason)]


def _model_settings(layers: int, hidden: int, num_steps: int, dropout: float) -> list[Setting]:
    return [
        Setting("model.layers", layers, "recurrent layers; a deeper network needs more data and time"),
        Setting("model.hidden", hidden, f"size of the hidden state: a first choice for {num_steps:,} time steps"),
        Setting("model.dropout", dropout, "against overfitting"),
    ]


def _schedule_settings(data: _DataSettings, num_validation_steps: float) -> list[Setting]:
    """Return how long to train, the learning rate, and when to log, evaluate and save."""
    affordable_steps = _flops_per_second() * _TARGET_SECONDS / data.flops
    # Small data is read more often: a network learns nothing in a dozen batches.
    max_epochs = max(data.max_epochs, math.ceil(_MIN_BATCHES * data.batch_steps / data.num_steps))
    epochs = int(min(max_epochs, _MAX_EPOCHS, affordable_steps / data.num_steps))
    num_batches = epochs * math.ceil(data.num_steps / data.batch_steps)
    if epochs < 1:
        num_batches = max(1, round(affordable_steps / data.batch_steps))
    settings = [Setting("train.epochs", epochs, "at most about a minute on this machine")]
    if epochs < 1:
        percent = 100 * affordable_steps / data.num_steps
        reason = f"about a minute on this machine, {percent:.3g}% of the data; set epochs instead to read all of it"
        settings = [Setting("train.steps", num_batches, reason)]
    learning_rate = {"lanes": 4e-3, "batches": 3e-3, "forecast": 1e-3}[data.feed]
    settings += [
        Setting("train.lr", learning_rate, "peak learning rate; larger networks need a lower one"),
        Setting("train.warmup", min(50, max(1, num_batches // 10)), "steps until the peak"),
        Setting("run.log_every", max(1, num_batches // 20), "steps between progress lines if stdout is not a terminal"),
        Setting(
            "save.minutes", 0.25, "minutes between checkpoints (Ctrl-C also saves one); use about 10 for a long run"
        ),
    ]
    if num_validation_steps:
        # Evaluating a step costs a third of training on it. There are as many evaluations, from 2 to 5, as fit into a
        # fifth of the training time.
        num_evaluations = int(min(5, max(2, 0.6 * num_batches * data.batch_steps / num_validation_steps)))
        reason = f"steps between evaluations: {num_evaluations} in about {num_batches:,} steps"
        settings += [
            Setting("run.eval_every", math.ceil(num_batches / num_evaluations), reason),
            Setting("save.keep_best", True, "also the checkpoint with the lowest validation loss: RUN@best"),
        ]
    return settings


def _model_size(num_steps: int, max_weights: int, num_inputs: int, num_outputs: int) -> tuple[int, int]:
    """Return the largest (layers, hidden) with at most `max_weights` that reads the data twice in the target time."""
    affordable_flops = _flops_per_second() * _TARGET_SECONDS
    best = _MODEL_SIZES[0]
    for layers, hidden in _MODEL_SIZES:
        is_small_enough = 8 * layers * hidden**2 <= max_weights  # left: roughly an LSTM's number of weights
        flops = _flops(layers, hidden, min(num_inputs, hidden), num_outputs)  # an embedding has `hidden` values
        if is_small_enough and 2 * num_steps * flops <= affordable_flops:
            best = (layers, hidden)
    # If even a small model can't read all data in time, only a part of it is read, by a model of medium size.
    is_too_much = num_steps * _flops(1, 128, 128, num_outputs) > affordable_flops
    return (1, 192) if is_too_much and not _has_accelerator() else best


def _flops(layers: int, hidden: int, num_inputs: int, num_outputs: int) -> float:
    """Return the floating-point operations to train on a step of one row; `num_inputs`: of the first LSTM layer."""
    num_weights = 4 * hidden * (num_inputs + hidden) + (layers - 1) * 8 * hidden**2 + hidden * num_outputs
    return 6.0 * num_weights  # a multiplication and an addition forward, and twice that backward


def _flops_per_second() -> float:
    num_cores = min(len(os.sched_getaffinity(0)), 4)
    return _DEVICE_FLOPS_PER_SECOND if _has_accelerator() else _CORE_FLOPS_PER_SECOND * num_cores


def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def _num_steps(store: Corpus | Sequences) -> int:
    return store.num_tokens if isinstance(store, Corpus) else store.num_steps


def _floor_power_of_two(number: int) -> int:
    """Return the largest power of two up to a number; at least 1."""
    return 1 << max(0, number.bit_length() - 1)


def _duration_text(seconds: float) -> str:
    names = ((365 * 86400, "a year"), (7 * 86400, "a week"), (86400, "a day"), (3600, "an hour"), (60, "a minute"))
    return next((name for size, name in names if abs(seconds / size - 1) < 0.05), f"{seconds:,.0f} s")
