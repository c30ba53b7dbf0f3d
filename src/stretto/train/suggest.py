"""suggest: a first run for prepared data, with a reason for each setting."""

import os
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from stretto.base.errors import DataError
from stretto.config.run import RunConfig
from stretto.config.toml import parse_config
from stretto.config.toml_comments import Setting, format_commented_toml
from stretto.prepare.inspection import Inspection
from stretto.prepare.prepare_data import PreparedData
from stretto.prepare.series_data import SeriesData
from stretto.store.corpus import Corpus
from stretto.store.sequences import Channels, Sequences
from stretto.train.build import build_inputs
from stretto.windows.forecast import Forecast
from stretto.windows.items import SlidingWindows

# A first run should take about this many seconds.
_TARGET_SECONDS = 75
# Roughly what training reaches per core and per accelerator, everything included.
_CORE_FLOPS = 40e9
_DEVICE_FLOPS = 10e12
# (layers, hidden), the smallest first.
_MODEL_SIZES = ((1, 64), (1, 96), (1, 128), (1, 192), (1, 256), (2, 256), (2, 384), (2, 512), (2, 768), (3, 1024))
# The naive loss of a forecast is estimated from at most this many windows.
_MAX_NAIVE_WINDOWS = 2000
_ROWS = 32
_MIN_BATCHES = 200
_MAX_EPOCHS = 100
# Fields that are shown as comments, with their defaults; a forecast also has data.stride.
_OPTIONAL_FIELDS = ("data.workers", "model.cell", "layout.auto", "save.keep_best")


@dataclass(frozen=True)
class Suggestion:
    """A run that can be trained as it is: its TOML file with a comment on each line, and the same as a config."""

    text: str
    config: RunConfig
    naive_loss: float | None = None  # of repeating the last season of a series, on the validation data


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
    """Return a run for data that `inspect_data` inspected and `prepare_data` prepared.

    On the cores of this machine it takes about two minutes; with an accelerator the model is larger. `horizon`,
    `season`, `context` and `targets` of a forecast are chosen from the data where they are not given.
    """
    train, valid = prepared.train, prepared.valid
    naive_loss = None
    if isinstance(train, Corpus):
        data_settings = _lanes(train)
    elif isinstance(train.fields.values, Channels) and train.fields.labels is None:
        data = inspection.data
        series = data if isinstance(data, SeriesData) else SeriesData(train.fields.values.names)
        request = _ForecastRequest(horizon, season, context, tuple(targets))
        forecast, context = _choose_forecast(series, train, valid, request)
        if forecast.season and isinstance(valid, Sequences):
            naive_loss = _naive_loss(SlidingWindows(valid, forecast, context))
        data_settings = _forecast(forecast, context, targets, series, train, naive_loss)
    else:
        data_settings = _batches(train)
    num_validation_steps = 0 if valid is None else _num_steps(valid) * data_settings.row_steps_per_step
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
        f"{data_settings.title}, written by `stretto init`. Train it with",
        f"  stretto train {shlex.quote(str(path))}",
        "`stretto train --help` explains every field. An option overrides a field: --train.lr 3e-4",
    )
    optional_fields = ("data.stride", *_OPTIONAL_FIELDS) if data_settings.feed == "forecast" else _OPTIONAL_FIELDS
    text = format_commented_toml(header, settings, optional_fields)
    config = parse_config(tomllib.loads(text), "the suggested run")
    build_inputs(config)
    return Suggestion(text, config, naive_loss)


@dataclass(frozen=True)
class _DataSettings:
    """The settings that depend on the kind of data, and what the others need to know of it."""

    title: str
    feed: str
    settings: tuple[Setting, ...]
    flops: float  # per step of one row, forward and backward
    num_steps: int  # steps of all rows in an epoch
    batch: int  # steps of all rows in a global batch
    max_epochs: int
    row_steps_per_step: float = 1.0  # steps of rows per step of the data: sliding windows overlap


def _lanes(corpus: Corpus) -> _DataSettings:
    num_tokens, level = corpus.num_tokens, corpus.vocabulary.level
    num_symbols = len(corpus.vocabulary)
    window = min(128 if _has_accelerator() else 64, max(1, num_tokens // 8))
    lanes = _floor_power_of_two(min(64 if _has_accelerator() else _ROWS, num_tokens // (8 * window)))
    layers, hidden = _model_size(num_tokens, num_tokens, num_symbols, num_symbols)
    settings = (
        Setting("data.lanes", lanes, f"parallel streams of {num_tokens // lanes:,} tokens each, with carried state"),
        Setting("data.window", window, f"steps of backpropagation; a batch has {lanes * window:,} tokens"),
        *_model_settings(layers, hidden, num_tokens, 0.1),
    )
    flops = _flops(layers, hidden, hidden, num_symbols)
    title = f"A language model of {num_tokens:,} {level}s"
    return _DataSettings(title, "lanes", settings, flops, num_tokens, lanes * window, 20)


def _batches(sequences: Sequences) -> _DataSettings:
    labels, values = sequences.fields.labels, sequences.fields.values
    num_steps, mean = sequences.num_steps, sequences.mean_length
    num_inputs = len(values.names) if isinstance(values, Channels) else values.num_tokens
    num_outputs = num_inputs if labels is None else len(labels.names)
    budget = max(_floor_power_of_two(round(_ROWS * mean * 1.5)), -(-sequences.longest // 256) * 256, 256)
    # A classifier computes its outputs once per row, which costs next to nothing.
    outputs_per_step = num_outputs if labels is None else 0
    layers, hidden = _model_size(num_steps, num_steps, num_inputs, outputs_per_step)
    num_rows = max(1, round(budget / max(mean, 1)))
    settings = (
        Setting("data.budget", budget, f"steps per batch: about {num_rows} rows of {mean:.0f} steps on average"),
        *_model_settings(layers, hidden, num_steps, 0.1 if labels is None else 0.3),
    )
    flops = _flops(layers, hidden, min(num_inputs, hidden), outputs_per_step)
    kind = "A language model of" if labels is None else f"A classifier ({num_outputs:,} classes) of"
    title = f"{kind} {sequences.num_sequences:,} sequences"
    # A part of the budget is padding.
    return _DataSettings(title, "batches", settings, flops, num_steps, round(0.8 * budget), 10)


@dataclass(frozen=True)
class _ForecastRequest:
    """What the user wants of a forecast; None is chosen from the data."""

    horizon: int | None
    season: int | None
    context: int | None
    targets: tuple[str, ...]


def _choose_forecast(
    series: SeriesData, train: Sequences, valid: Sequences | Corpus | None, request: _ForecastRequest
) -> tuple[Forecast, int]:
    """Return a forecast for the data, and the number of steps that it sees."""
    store = min((store for store in (train, valid) if isinstance(store, Sequences)), key=lambda store: store.longest)
    num_available = store.longest
    horizon = request.horizon or max(1, min(series.period or 8, num_available // 4))
    season = request.season
    if season is None:
        # The value one season before must be known when the forecast is made: so many whole periods that they cover
        # the horizon.
        season = series.period * -(-horizon // series.period) if series.period else 0
        season = season if season + horizon <= num_available else 0
    default_context = min(max(4 * season, 2 * horizon, 32), num_available - horizon, 1024)
    context = request.context or max(season, 1, default_context)
    if context + horizon > num_available:
        named = [("season", request.season), ("horizon", request.horizon), ("context", request.context)]
        given = " and ".join(f"{name}={value}" for name, value in named if value)
        raise DataError(
            f"{store.location}: {given or 'a forecast'} needs {context + horizon} steps, but the longest series has "
            f"{num_available}; {'use less' if given else 'use longer series'}, or a different validation_fraction "
            "(validation_fraction=0: no validation data)"
        )
    forecast = Forecast.from_sequences(train, horizon, season=season, targets=request.targets, masks=series.has_missing)
    return forecast, context


def _forecast(
    forecast: Forecast,
    context: int,
    targets: Sequence[str],
    series: SeriesData,
    train: Sequences,
    naive_loss: float | None,
) -> _DataSettings:
    num_inputs, num_outputs = forecast.task.num_inputs, forecast.task.num_outputs
    num_steps = sum(SlidingWindows(train, forecast, context).shard_sizes) * context
    layers, hidden = _model_size(num_steps, train.num_steps * 4, num_inputs, num_outputs)
    budget = 64 * context
    duration = ""
    if series.seconds and forecast.horizon == series.period:
        duration = f" ({_duration_text(series.period * series.seconds)})"
    settings = [
        Setting("data.context", context, "steps that the network sees before it makes a forecast"),
        Setting("data.horizon", forecast.horizon, f"steps ahead to forecast{duration}"),
    ]
    if forecast.season:
        naive = "" if naive_loss is None else f"; predicting no difference has loss {naive_loss:.4f}"
        reason = f"targets are differences to the value this many steps before{naive}"
        settings.append(Setting("data.season", forecast.season, reason))
    if targets:
        settings.append(Setting("data.targets", list(targets), "the channels to forecast"))
    if series.has_missing:
        settings.append(
            Setting("data.masks", True, "some values are missing: the network gets a mask for each channel")
        )
    settings += [
        Setting("data.every_step", True, "train on a forecast at every step of the context, not only the last"),
        Setting("data.budget", budget, f"steps per batch: {budget // context} windows of {context}"),
        *_model_settings(layers, hidden, num_steps, 0.5),
        Setting("train.weight_decay", 0.1, "series change with time, so overfitting is the main risk"),
    ]
    flops = _flops(layers, hidden, num_inputs, num_outputs)
    channels = "1 channel" if len(forecast.channels) == 1 else f"{len(forecast.channels)} channels"
    title = f"A forecast of {channels}, {forecast.horizon} steps ahead from {context}"
    row_steps_per_step = num_steps / max(train.num_steps, 1)
    return _DataSettings(title, "forecast", tuple(settings), flops, num_steps, budget, 1, row_steps_per_step)


def _naive_loss(windows: SlidingWindows) -> float:
    """The loss of a forecast that repeats the last season: its prediction of the difference is zero."""
    sizes = windows.shard_sizes
    stride = max(1, sum(sizes) // _MAX_NAIVE_WINDOWS)
    row_ids = [(shard, number) for shard, size in enumerate(sizes) for number in range(0, size, stride)]
    _, targets = windows.read(row_ids, windows.context, inputs=False, targets=True)
    assert targets is not None
    return float(np.nanmean(np.square(targets[-1].double().numpy())))


def _model_settings(layers: int, hidden: int, num_steps: int, dropout: float) -> list[Setting]:
    return [
        Setting("model.layers", layers, "recurrent layers; more need more data and time"),
        Setting("model.hidden", hidden, f"features of the hidden state: a first size for {num_steps:,} steps of data"),
        Setting("model.dropout", dropout, "against overfitting"),
    ]


def _schedule_settings(data: _DataSettings, num_validation_steps: float) -> list[Setting]:
    """How long to train, and when to log, evaluate and save."""
    affordable_steps = _available_flops() * _TARGET_SECONDS / data.flops
    # Small data is read more often: a network learns nothing in a dozen batches.
    max_epochs = max(data.max_epochs, -(-_MIN_BATCHES * data.batch // data.num_steps))
    epochs = int(min(max_epochs, _MAX_EPOCHS, affordable_steps / data.num_steps))
    num_batches = max(1, round(min(max(epochs, 1) * data.num_steps, affordable_steps) / data.batch))
    settings = [Setting("train.epochs", epochs, "about a minute on this machine")]
    if epochs < 1:
        fraction = affordable_steps / data.num_steps
        reason = f"about a minute on this machine, {fraction:.0%} of the data; set epochs instead to read all of it"
        settings = [Setting("train.steps", num_batches, reason)]
    rate = {"lanes": 4e-3, "batches": 3e-3, "forecast": 1e-3}[data.feed]
    settings += [
        Setting("train.lr", rate, "peak learning rate of AdamW; larger networks need less"),
        Setting("train.warmup", min(50, max(1, num_batches // 10)), "steps until the peak"),
        Setting("run.log_every", max(1, num_batches // 20), "steps between lines of output, without a terminal"),
        Setting("save.minutes", 2.0, "minutes between checkpoints, from which an interrupted run resumes"),
    ]
    if num_validation_steps:
        # A step of evaluation costs a third of a training step. All evaluations may take a fifth of the run.
        num_evaluations = int(min(5, max(2, 0.6 * num_batches * data.batch / num_validation_steps)))
        reason = f"steps between evaluations: {num_evaluations} in about {num_batches:,} steps"
        settings.append(Setting("run.eval_every", -(-num_batches // num_evaluations), reason))
    return settings


def _model_size(num_steps: int, max_weights: int, num_inputs: int, num_outputs: int) -> tuple[int, int]:
    """The largest (layers, hidden) that the data justifies, and that can read the data twice in the target time."""
    affordable_flops = _available_flops() * _TARGET_SECONDS
    best = _MODEL_SIZES[0]
    for layers, hidden in _MODEL_SIZES:
        is_justified = 8 * layers * hidden**2 <= max(max_weights, 20_000)
        flops = _flops(layers, hidden, min(num_inputs, hidden), num_outputs)
        if is_justified and 2 * num_steps * flops <= affordable_flops:
            best = (layers, hidden)
    # With more data than can be read in time, only a part of it is read.
    is_too_much = num_steps * _flops(1, 128, 128, num_outputs) > affordable_flops
    return (1, 192) if is_too_much and not _has_accelerator() else best


def _flops(layers: int, hidden: int, num_inputs: int, num_outputs: int) -> float:
    """Floating-point operations per step of one row, forward and backward."""
    recurrent = 4 * hidden * (num_inputs + hidden) + (layers - 1) * 8 * hidden**2
    return 6.0 * (recurrent + hidden * num_outputs)


def _available_flops() -> float:
    return _DEVICE_FLOPS if _has_accelerator() else _CORE_FLOPS * min(len(os.sched_getaffinity(0)), 4)


def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def _num_steps(store: Corpus | Sequences) -> int:
    return store.num_tokens if isinstance(store, Corpus) else store.num_steps


def _floor_power_of_two(number: int) -> int:
    """The largest power of two up to a number."""
    return 1 << max(0, number.bit_length() - 1)


def _duration_text(seconds: float) -> str:
    names = ((365 * 86400, "a year"), (7 * 86400, "a week"), (86400, "a day"), (3600, "an hour"), (60, "a minute"))
    return next((name for size, name in names if abs(seconds / size - 1) < 0.05), f"{seconds:,.0f} s")
