"""Feed: the windows that a config asks for, from whatever its data is; and what a model must remember of that data."""

from dataclasses import dataclass, replace
from pathlib import Path

from stretto.base.errors import ConfigError, DataError
from stretto.base.remote import is_remote
from stretto.config.layout import Layout
from stretto.config.run import DataConfig, RunConfig
from stretto.store.cache import Cache
from stretto.store.corpus import Corpus
from stretto.store.index import Store
from stretto.store.sequences import Channels, Sequences
from stretto.train.data_spec import DataSpec, check_same_spec
from stretto.windows.batches import Batches
from stretto.windows.documents import DocumentLanes
from stretto.windows.forecast import Forecast
from stretto.windows.items import Items, LabeledItems, NextTokenItems, SlidingWindows
from stretto.windows.lanes import Lanes
from stretto.windows.loader import WindowSource

# Which fields mean something to which feed; those that are not named here always do.
_FEEDS_BY_FIELD = {
    **dict.fromkeys(("lanes", "window"), ("lanes",)),
    **dict.fromkeys(("budget", "rows", "row_multiple"), ("batches", "forecast")),
    **dict.fromkeys(("context", "stride", "every_step"), ("forecast",)),
    **dict.fromkeys(("horizon", "season", "targets"), ("lanes", "forecast")),
    "masks": ("lanes", "batches", "forecast"),
}
_CHANNEL_FIELDS = {"horizon", "season", "targets", "masks"}


@dataclass(frozen=True)
class Feed:
    """WindowSource, and what they are about."""

    windows: WindowSource
    data_spec: DataSpec
    digest: str = ""  # of the data's index


def open_feeds(config: RunConfig) -> tuple[Feed, Feed | None]:
    """Return what to train on and what is held out, checked against each other; of all ranks together."""
    data = config.data
    train = open_feed(config, data.train, "data.train")
    if data.valid is None:
        return train, None
    valid = open_feed(config, data.valid, "data.valid", is_validation=True)
    check_same_spec(train.data_spec, valid.data_spec, f"data.valid={data.valid}", f"data.train={data.train}")
    return train, valid


def open_feed(config: RunConfig, location: str | Path, field: str, *, is_validation: bool = False) -> Feed:
    """Return the windows of the data at a location. Held-out data may be less than a window of each lane."""
    data = config.data
    cache = Cache(data.cache, data.cache_bytes, data.retry_seconds)
    try:
        store = Store.open(location, cache)
        if store.kind == "tokens":
            feed = _feed_corpus(Corpus.from_store(store), config, is_validation)
        else:
            feed = _feed_sequences(Sequences.from_store(store), config, is_validation)
        _check_num_rows(feed.windows, config.layout, is_validation)
        return replace(feed, digest=store.digest)
    except DataError as error:
        is_relative = not is_remote(location) and not Path(location).is_absolute()
        where = f", seen from {Path.cwd()}" if is_relative else ""
        raise DataError(f"{field}={location}{where}: {error}") from None


def _check_num_rows(windows: WindowSource, layout: Layout, is_validation: bool) -> None:
    """Refuse a layout that has more parts than there are rows; held-out rows may be few, and others blank."""
    windows.share(0, layout.replicas, layout.micro_batches)
    if isinstance(windows, Batches) and not is_validation and layout.num_global_micro_batches > windows.num_rows:
        raise DataError(
            f"layout.replicas={layout.replicas} x layout.micro_batches={layout.micro_batches} exceeds the {windows.num_rows:,} rows "
            "there are; use fewer, or more data"
        )


def _check_unused_fields(data: DataConfig, kind: str, has_channels: bool) -> None:
    """Refuse a field that was set but would change nothing."""
    for name, kinds in _FEEDS_BY_FIELD.items():
        value = getattr(data, name)
        if value == DataConfig.model_fields[name].default:
            continue
        if name in ("stride", "every_step") and data.feed is None and has_channels and data.context is None:
            raise ConfigError(
                f"data.{name}={value!r} needs data.context, the steps that a forecast may look at; set it"
            )
        if kind not in kinds or (name in _CHANNEL_FIELDS and not has_channels):
            what = f"data.feed={kind!r}" if kind not in kinds else "data without channels"
            raise ConfigError(f"data.{name}={value!r} has no meaning for {what}; leave it out")


def _feed_corpus(corpus: Corpus, config: RunConfig, is_validation: bool) -> Feed:
    data = config.data
    if data.feed not in (None, "lanes"):
        raise ConfigError(f"data.feed={data.feed!r} needs sequences, and a corpus is one long text; use lanes")
    if is_validation:
        windows = Lanes.fitting(corpus, data.lanes, data.window, config.layout.num_global_micro_batches)
    else:
        _check_unused_fields(data, "lanes", has_channels=False)
        windows = Lanes(corpus, data.lanes, data.window)
    return Feed(windows, DataSpec(windows.task, corpus.vocabulary))


def _feed_sequences(sequences: Sequences, config: RunConfig, is_validation: bool) -> Feed:
    data, seed = config.data, config.run.seed
    values, labels = sequences.fields.values, sequences.fields.labels
    kind = data.feed or _default_feed(sequences, data)
    if not is_validation:
        _check_unused_fields(data, kind, isinstance(values, Channels))
    windows: WindowSource
    if kind == "lanes":
        forecast = _forecast(sequences, data) if isinstance(values, Channels) else None
        if is_validation:
            least = config.layout.num_global_micro_batches
            windows = DocumentLanes.fitting(sequences, data.lanes, data.window, forecast, seed, least)
        else:
            windows = DocumentLanes(sequences, data.lanes, data.window, forecast, seed)
    else:
        items = _items(sequences, data, kind, is_validation)
        windows = Batches(items, data.budget, data.rows, data.row_multiple, seed)
    return Feed(
        windows,
        DataSpec(
            windows.task,
            sequences.vocabulary,
            labels.names if labels and windows.task.targets == "labels" else (),
            values if isinstance(values, Channels) else None,
            sequences.fields.origin,
        ),
    )


def _default_feed(sequences: Sequences, data: DataConfig) -> str:
    if isinstance(sequences.fields.values, Channels) and sequences.fields.labels is None:
        return "lanes" if data.context is None else "forecast"
    return "batches"


def _items(sequences: Sequences, data: DataConfig, kind: str, is_validation: bool) -> Items:
    if kind == "forecast":
        if data.context is None:
            raise ConfigError("data.context is not set; a forecast needs to know how many steps it may look at")
        # Held-out data is asked once a stretch, where a forecast would be made.
        every_step = data.every_step and not is_validation
        return SlidingWindows(sequences, _forecast(sequences, data), data.context, data.stride, every_step)
    return NextTokenItems(sequences) if sequences.fields.labels is None else LabeledItems(sequences, data.masks)


def _forecast(sequences: Sequences, data: DataConfig) -> Forecast:
    return Forecast.from_sequences(sequences, data.horizon, season=data.season, targets=data.targets, masks=data.masks)
