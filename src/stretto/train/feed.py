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
from stretto.train.subject import Subject, check_same
from stretto.windows.batches import Batches
from stretto.windows.documents import DocumentLanes
from stretto.windows.forecast import Forecast
from stretto.windows.items import Continued, Items, Labelled, Stretches
from stretto.windows.lanes import Lanes
from stretto.windows.loader import Windows

# Which fields mean something to which feed; those that are not named here always do.
_MEANING = {
    **dict.fromkeys(("lanes", "window"), ("lanes",)),
    **dict.fromkeys(("budget", "rows", "multiple"), ("batches", "forecast")),
    **dict.fromkeys(("context", "stride", "every_step"), ("forecast",)),
    **dict.fromkeys(("horizon", "season", "targets"), ("lanes", "forecast")),
    "masks": ("lanes", "batches", "forecast"),
}
_OF_CHANNELS = {"horizon", "season", "targets", "masks"}


@dataclass(frozen=True)
class Feed:
    """Windows, and what they are about."""

    windows: Windows
    subject: Subject
    digest: str = ""  # of the data's index


def open_feeds(config: RunConfig) -> tuple[Feed, Feed | None]:
    """Return what to train on and what is held out, checked against each other; of all ranks together."""
    data = config.data
    train = open_feed(config, data.train, "data.train")
    if data.valid is None:
        return train, None
    valid = open_feed(config, data.valid, "data.valid", is_held_out=True)
    check_same(train.subject, valid.subject, f"data.valid={data.valid}", f"data.train={data.train}")
    return train, valid


def open_feed(config: RunConfig, location: str | Path, field: str, *, is_held_out: bool = False) -> Feed:
    """Return the windows of the data at a location. Held-out data may be less than a window of each lane."""
    data = config.data
    cache = Cache(data.cache, data.cache_bytes, data.patience)
    try:
        store = Store.open(location, cache)
        if store.kind == "tokens":
            feed = _feed_corpus(Corpus.of(store), config, is_held_out)
        else:
            feed = _feed_sequences(Sequences.of(store), config, is_held_out)
        _check_parts(feed.windows, config.layout, is_held_out)
        return replace(feed, digest=store.digest)
    except DataError as error:
        is_relative = not is_remote(location) and not Path(location).is_absolute()
        where = f", seen from {Path.cwd()}" if is_relative else ""
        raise DataError(f"{field}={location}{where}: {error}") from None


def _check_parts(windows: Windows, layout: Layout, is_held_out: bool) -> None:
    """Refuse a layout that has more parts than there are rows; held-out rows may be few, and others blank."""
    windows.share(0, layout.replicas, layout.slices)
    if isinstance(windows, Batches) and not is_held_out and layout.num_parts > windows.num_rows:
        raise DataError(
            f"layout.replicas={layout.replicas} x layout.slices={layout.slices} exceeds the {windows.num_rows:,} rows "
            "there are; use fewer, or more data"
        )


def _check_meaning(data: DataConfig, kind: str, has_channels: bool) -> None:
    """Refuse a field that was set but would change nothing."""
    for name, kinds in _MEANING.items():
        value = getattr(data, name)
        if value == DataConfig.model_fields[name].default:
            continue
        if name in ("stride", "every_step") and data.feed is None and has_channels and data.context is None:
            raise ConfigError(
                f"data.{name}={value!r} needs data.context, the steps that a forecast may look at; set it"
            )
        if kind not in kinds or (name in _OF_CHANNELS and not has_channels):
            what = f"data.feed={kind!r}" if kind not in kinds else "data without channels"
            raise ConfigError(f"data.{name}={value!r} has no meaning for {what}; leave it out")


def _feed_corpus(corpus: Corpus, config: RunConfig, is_held_out: bool) -> Feed:
    data = config.data
    if data.feed not in (None, "lanes"):
        raise ConfigError(f"data.feed={data.feed!r} needs sequences, and a corpus is one long text; use lanes")
    if is_held_out:
        windows = Lanes.fitting(corpus, data.lanes, data.window, config.layout.num_parts)
    else:
        _check_meaning(data, "lanes", has_channels=False)
        windows = Lanes(corpus, data.lanes, data.window)
    return Feed(windows, Subject(windows.task, corpus.vocabulary))


def _feed_sequences(sequences: Sequences, config: RunConfig, is_held_out: bool) -> Feed:
    data, seed = config.data, config.run.seed
    values, labels = sequences.fields.values, sequences.fields.labels
    kind = data.feed or _usual_feed(sequences, data)
    if not is_held_out:
        _check_meaning(data, kind, isinstance(values, Channels))
    windows: Windows
    if kind == "lanes":
        forecast = _forecast(sequences, data) if isinstance(values, Channels) else None
        if is_held_out:
            least = config.layout.num_parts
            windows = DocumentLanes.fitting(sequences, data.lanes, data.window, forecast, seed, least)
        else:
            windows = DocumentLanes(sequences, data.lanes, data.window, forecast, seed)
    else:
        items = _items(sequences, data, kind, is_held_out)
        windows = Batches(items, data.budget, data.rows, data.multiple, seed)
    return Feed(
        windows,
        Subject(
            windows.task,
            sequences.vocabulary,
            labels.names if labels and windows.task.asks == "labels" else (),
            values if isinstance(values, Channels) else None,
            sequences.fields.origin,
        ),
    )


def _usual_feed(sequences: Sequences, data: DataConfig) -> str:
    if isinstance(sequences.fields.values, Channels) and sequences.fields.labels is None:
        return "lanes" if data.context is None else "forecast"
    return "batches"


def _items(sequences: Sequences, data: DataConfig, kind: str, is_held_out: bool) -> Items:
    if kind == "forecast":
        if data.context is None:
            raise ConfigError("data.context is not set; a forecast needs to know how many steps it may look at")
        # Held-out data is asked once a stretch, where a forecast would be made.
        every_step = data.every_step and not is_held_out
        return Stretches(sequences, _forecast(sequences, data), data.context, data.stride, every_step)
    return Continued(sequences) if sequences.fields.labels is None else Labelled(sequences, data.masks)


def _forecast(sequences: Sequences, data: DataConfig) -> Forecast:
    return Forecast.of(sequences, data.horizon, season=data.season, targets=data.targets, masks=data.masks)
