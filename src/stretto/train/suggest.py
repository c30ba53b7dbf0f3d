"""Starter: a run for data that nobody has trained on yet: sizes from the data and the machine, each with its reason."""

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
from stretto.config.toml_comments import Setting, write_commented_toml
from stretto.prepare.inspection import Inspection
from stretto.prepare.prepare_data import PreparedData
from stretto.prepare.series_data import SeriesData
from stretto.store.corpus import Corpus
from stretto.store.sequences import Channels, Sequences
from stretto.train.build import validate_config
from stretto.windows.forecast import Forecast
from stretto.windows.items import SlidingWindows

# A first run ends within about so many seconds.
_TARGET_SECONDS = 75
# What a core, and an accelerator, get done in training, with all that is around the products: about.
_CORE_FLOPS = 40e9
_DEVICE_FLOPS = 10e12
# Layers and width, the smallest first.
_MODEL_SIZES = ((1, 64), (1, 96), (1, 128), (1, 192), (1, 256), (2, 256), (2, 384), (2, 512), (2, 768), (3, 1024))
# Of the stretches of a series, so many tell what repeating its last season is worth.
_MAX_NAIVE_WINDOWS = 2000
_ROWS = 32
_MIN_BATCHES = 200
_MAX_EPOCHS = 100


@dataclass(frozen=True)
class Suggestion:
    """A run that trains as it is: its TOML file with a comment on each line, and what that says."""

    text: str
    config: RunConfig
    naive_loss: float | None = None  # of repeating the last season of a series, on held-out data


def suggest(
    found: Inspection,
    prepared: PreparedData,
    *,
    folder: Path | str = "runs/default",
    path: Path | str = "run.toml",
    horizon: int | None = None,
    season: int | None = None,
    context: int | None = None,
    targets: Sequence[str] = (),
) -> Suggestion:
    """Return a run for data that `inspect_data` found and `prepare_data` prepared.

    Sizes are such that a run on this machine's cores ends within about two minutes, and larger where there is an
    accelerator. What is said of a forecast is kept as it is.
    """
    train, valid = prepared.train, prepared.valid
    naive_loss = None
    if isinstance(train, Corpus):
        shape = _lanes(train)
    elif isinstance(train.fields.values, Channels) and train.fields.labels is None:
        series = found.data if isinstance(found.data, SeriesData) else SeriesData(train.fields.values.names)
        forecast = _forecast(series, train, valid, horizon, season, context, targets)
        shape, naive_loss = forecast.shape, forecast.naive_loss
    else:
        shape = _batches(train)
    settings = [
        Setting("data.train", train.location, "made by `stretto init`"),
        *([Setting("data.valid", valid.location, "held out: never trained on")] if valid is not None else []),
        *shape.settings,
        Setting("run.folder", str(folder), "config, log, checkpoints and weights go here"),
        *_schedule_settings(shape, 0 if valid is None else _num_steps(valid) * shape.row_steps_per_step),
        *_precision_settings(),
    ]
    title = (
        f"{shape.title}, written by `stretto init`. It trains as it is:",
        f"  stretto train {shlex.quote(str(path))}",
        "Every field with its meaning: `stretto train --help`. An option overrides a field: --train.lr 3e-4",
    )
    text = write_commented_toml(title, settings, _OPTIONAL_FIELDS[shape.feed])
    config = parse_config(tomllib.loads(text), "the suggested run")
    validate_config(config)
    return Suggestion(text, config, naive_loss)


_OPTIONAL_FIELDS = {
    "lanes": ("data.workers", "model.cell", "layout.auto", "save.keep_best"),
    "batches": ("data.workers", "model.cell", "layout.auto", "save.keep_best"),
    "forecast": ("data.stride", "data.workers", "model.cell", "layout.auto", "save.keep_best"),
}


@dataclass(frozen=True)
class _DataSettings:
    """What is decided by the kind of data."""

    title: str
    feed: str
    settings: tuple[Setting, ...]
    flops: float  # of a step of one row, forward and backward
    num_steps: int  # of rows, in an epoch
    batch: int  # steps of rows in a global batch
    max_epochs: int
    row_steps_per_step: float = 1.0  # steps of rows for each step of the data


def _lanes(corpus: Corpus) -> _DataSettings:
    num_tokens, level = corpus.num_tokens, corpus.vocabulary.level
    num_symbols = len(corpus.vocabulary)
    window = min(128 if _has_accelerator() else 64, max(1, num_tokens // 8))
    lanes = _floor_power_of_two(min(64 if _has_accelerator() else _ROWS, num_tokens // (8 * window)))
    layers, hidden = _size(num_tokens, num_tokens, num_symbols, num_symbols)
    settings = (
        Setting("data.lanes", lanes, f"streams side by side, each of {num_tokens // lanes:,} tokens, state carried on"),
        Setting("data.window", window, f"a step sees {lanes * window:,} tokens; gradients go back this far"),
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
    asked = num_outputs if labels is None else 0
    layers, hidden = _size(num_steps, num_steps, num_inputs, asked)
    settings = (
        Setting(
            "data.budget", budget, f"steps of a batch: about {_rows(budget, mean)} rows, {mean:.0f} long on average"
        ),
        *_model_settings(layers, hidden, num_steps, 0.1 if labels is None else 0.3),
    )
    flops = _flops(layers, hidden, min(num_inputs, hidden), asked)
    what = "A model that goes on with" if labels is None else f"A classifier ({num_outputs:,} classes) of"
    title = f"{what} {sequences.num_sequences:,} sequences"
    # Padding, and rows that no longer fit in, are part of a budget.
    return _DataSettings(title, "batches", settings, flops, num_steps, round(0.8 * budget), 10)


@dataclass(frozen=True)
class _ForecastSettings:
    shape: _DataSettings
    naive_loss: float | None


def _forecast(
    series: SeriesData,
    train: Sequences,
    valid: Sequences | Corpus | None,
    horizon: int | None,
    season: int | None,
    context: int | None,
    targets: Sequence[str],
) -> _ForecastSettings:
    given = [("season", season), ("horizon", horizon), ("context", context)]
    store = min((store for store in (train, valid) if isinstance(store, Sequences)), key=lambda store: store.longest)
    shortest = store.longest
    horizon = horizon or max(1, min(series.period or 8, shortest // 4))
    if season is None:
        # What is compared with must be known by then: whole periods, as many as the horizon has.
        season = series.period * -(-horizon // series.period) if series.period else 0
        season = season if season + horizon <= shortest else 0
    context = context or max(season, 1, min(max(4 * season, 2 * horizon, 32), shortest - horizon, 1024))
    if context + horizon > shortest:
        asked = " and ".join(f"--{name}={value}" for name, value in given if value)
        remedy = "use less" if asked else "give longer series"
        raise DataError(
            f"{store.location}: no series is longer than {shortest}, and {asked or 'a forecast'} needs "
            f"{context + horizon} steps; {remedy}, or hold out another part with --validation-fraction (0: none)"
        )
    forecast = Forecast.from_sequences(train, horizon, season=season, targets=targets, masks=series.has_missing)
    num_stretches = sum(SlidingWindows(train, forecast, context).shard_sizes)
    num_steps = num_stretches * context
    naive_loss = None
    if season and isinstance(valid, Sequences):
        naive_loss = _naive_loss(SlidingWindows(valid, forecast, context))
    layers, hidden = _size(num_steps, train.num_steps * 4, forecast.task.num_inputs, forecast.task.num_outputs)
    budget = 64 * context
    every = "" if series.period == 0 or not series.seconds else f" ({_duration_text(series.period * series.seconds)})"
    settings = [
        Setting("data.context", context, "steps that a forecast looks at"),
        Setting("data.horizon", horizon, f"steps ahead that are asked for{every if horizon == series.period else ''}"),
    ]
    if season:
        beat = "" if naive_loss is None else f"; no difference: loss {naive_loss:.4f}"
        settings.append(Setting("data.season", season, f"asked is the difference to so many steps before{beat}"))
    if targets:
        settings.append(Setting("data.targets", list(targets), "the channels that are asked for"))
    if series.has_missing:
        settings.append(Setting("data.masks", True, "some values are missing: the network is told which"))
    settings += [
        Setting("data.every_step", True, "in training, every step of the context is asked, not only its last"),
        Setting("data.budget", budget, f"steps of a batch: {budget // context} stretches of {context}"),
        *_model_settings(layers, hidden, num_steps, 0.5),
        Setting("train.weight_decay", 0.1, "a series changes with time: what was learned by heart is of no use"),
    ]
    flops = _flops(layers, hidden, forecast.task.num_inputs, forecast.task.num_outputs)
    num_channels = len(forecast.channels)
    title = f"A forecast of {num_channels} channel{'s' * (num_channels > 1)}, {horizon} steps ahead from {context}"
    each = num_steps / max(train.num_steps, 1)
    return _ForecastSettings(
        _DataSettings(title, "forecast", tuple(settings), flops, num_steps, budget, 1, each), naive_loss
    )


def _naive_loss(stretches: SlidingWindows) -> float:
    """The loss of a forecast that says what was one season before: nothing at all is then the answer."""
    sizes = stretches.shard_sizes
    apart = max(1, sum(sizes) // _MAX_NAIVE_WINDOWS)
    some = [(shard, number) for shard, size in enumerate(sizes) for number in range(0, size, apart)]
    asked = stretches.read(some, stretches.context, inputs=False, targets=True)[1]
    assert asked is not None
    return float(np.nanmean(np.square(asked[-1].double().numpy())))


def _model_settings(layers: int, hidden: int, num_steps: int, dropout: float) -> list[Setting]:
    return [
        Setting("model.layers", layers, "recurrent layers; a second one pays with more data and time"),
        Setting("model.hidden", hidden, f"features of the state: what {num_steps:,} steps are worth in a first run"),
        Setting("model.dropout", dropout, "a little noise against learning by heart"),
    ]


def _schedule_settings(shape: _DataSettings, num_validation_steps: float) -> list[Setting]:
    """How long to train, when to look, when to save."""
    affordable = _available_flops() * _TARGET_SECONDS / shape.flops
    # Little data is read more often: a network learns nothing in a dozen steps.
    max_epochs = max(shape.max_epochs, -(-_MIN_BATCHES * shape.batch // shape.num_steps))
    epochs = int(min(max_epochs, _MAX_EPOCHS, affordable / shape.num_steps))
    num_batches = max(1, round(min(max(epochs, 1) * shape.num_steps, affordable) / shape.batch))
    settings = [Setting("train.epochs", epochs, "times that the data is read, in about a minute here")]
    if epochs < 1:
        part = affordable / shape.num_steps
        reason = f"about a minute here: {part:.0%} of the data; set epochs instead to read all of it"
        settings = [Setting("train.steps", num_batches, reason)]
    rate = {"lanes": 4e-3, "batches": 3e-3, "forecast": 1e-3}[shape.feed]
    settings += [
        Setting("train.lr", rate, "AdamW's peak, for small networks; larger ones want less"),
        Setting("train.warmup", min(50, max(1, num_batches // 10)), "steps until the peak"),
        Setting("run.log_every", max(1, num_batches // 20), "steps between lines, where there is no terminal"),
    ]
    if num_validation_steps:
        # An evaluation is a third of the work of training; all of them together shall be a fifth of it at most.
        looks = int(min(5, max(2, 0.6 * num_batches * shape.batch / num_validation_steps)))
        reason = f"steps between looks at what is held out: {looks} in about {num_batches:,}"
        settings.append(Setting("run.eval_every", -(-num_batches // looks), reason))
    return [*settings, Setting("save.minutes", 2.0, "between checkpoints: a run that is cut off goes on from the last")]


def _precision_settings() -> list[Setting]:
    if not _has_accelerator():
        return []
    return [Setting("run.precision", "bf16", "products in bf16, which accelerators do fastest; weights stay fp32")]


def _size(num_steps: int, max_weights: int, num_inputs: int, num_outputs: int) -> tuple[int, int]:
    """Layers and width: no more weights than the data is worth, and such that it can be read twice in the time."""
    affordable = _available_flops() * _TARGET_SECONDS
    best = _MODEL_SIZES[0]
    for layers, hidden in _MODEL_SIZES:
        is_worth = 8 * layers * hidden**2 <= max(max_weights, 20_000)
        if is_worth and 2 * num_steps * _flops(layers, hidden, min(num_inputs, hidden), num_outputs) <= affordable:
            best = (layers, hidden)
    # More data than can be read in the time: then not all of it is.
    is_more = num_steps * _flops(1, 128, 128, num_outputs) > affordable
    return (1, 192) if is_more and not _has_accelerator() else best


def _flops(layers: int, hidden: int, num_inputs: int, num_outputs: int) -> float:
    """Products of a step of one row, forward and backward."""
    recurrent = 4 * hidden * (num_inputs + hidden) + (layers - 1) * 8 * hidden**2
    return 6.0 * (recurrent + hidden * num_outputs)


def _available_flops() -> float:
    return _DEVICE_FLOPS if _has_accelerator() else _CORE_FLOPS * min(len(os.sched_getaffinity(0)), 4)


def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def _num_steps(store: Corpus | Sequences) -> int:
    return store.num_tokens if isinstance(store, Corpus) else store.num_steps


def _rows(budget: int, mean: float) -> int:
    return max(1, round(budget / max(mean, 1)))


def _floor_power_of_two(number: int) -> int:
    """The largest power of two that is not more."""
    return 1 << max(0, number.bit_length() - 1)


def _duration_text(seconds: float) -> str:
    names = ((365 * 86400, "a year"), (7 * 86400, "a week"), (86400, "a day"), (3600, "an hour"), (60, "a minute"))
    return next((name for size, name in names if abs(seconds / size - 1) < 0.05), f"{seconds:,.0f} s")
