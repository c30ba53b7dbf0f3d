"""Feed: a dataset cut into windows as a config says, with the spec of that data."""

from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path

from stretto.base.errors import ConfigError, DataError, StrettoError
from stretto.base.reason import class_and_reason
from stretto.base.remote import is_remote
from stretto.config.layout import Layout
from stretto.config.run import DataConfig
from stretto.store.cache import KEPT_FRACTION, Cache
from stretto.store.corpus import Corpus, CorpusFields
from stretto.store.index import Store
from stretto.store.pages import PAGE_BYTES
from stretto.store.sequences import Channels, Sequences, TargetValues
from stretto.train.data_spec import DataSpec, check_same_spec
from stretto.train.user_code import load_object
from stretto.windows.batches import Batches
from stretto.windows.documents import DocumentLanes
from stretto.windows.forecast import ForecastTransform
from stretto.windows.items import Items, NextTokenItems, SlidingWindows
from stretto.windows.labeled_items import CutLabeledItems, LabeledItems
from stretto.windows.lanes import Lanes
from stretto.windows.loader import WindowSource

# The kinds of feed that use each of these fields of DataConfig; all kinds use the other fields.
_FEED_KINDS_BY_FIELD = {
    **dict.fromkeys(("lanes", "window"), ("lanes",)),
    **dict.fromkeys(("budget", "max_rows", "row_multiple"), ("batches", "forecast")),
    "context": ("batches", "forecast"),
    **dict.fromkeys(("stride", "every_step"), ("forecast",)),
    **dict.fromkeys(("horizon", "season", "targets", "known_future", "static"), ("lanes", "forecast")),
    # All kinds, but only on data with channels.
    **dict.fromkeys(("masks", "scale"), ("lanes", "batches", "forecast")),
}
# These have an effect only on data with channels.
_CHANNEL_FIELDS = {"horizon", "season", "targets", "known_future", "static", "masks", "scale"}


@dataclass(frozen=True)
class Feed:
    """The windows of a dataset, for all ranks together, and what their numbers mean."""

    windows: WindowSource
    data_spec: DataSpec
    digest: str = ""  # hash of the data's index
    target_std: tuple[float, ...] = ()  # that each value to predict is divided by; empty if targets are not scaled


def open_feeds(
    data: DataConfig, layout: Layout, seed: int, *, checks_files: bool = True, ranks_per_node: int | None = None
) -> tuple[Feed, Feed | None]:
    """Return the feeds of the training and the validation data, checked against each other.

    `checks_files` is as in `Store.open`. The cache has room for what the lanes of `ranks_per_node` ranks
    need; None: not a run.
    """
    if data.factory is not None:
        return _factory_feeds(data.factory, data, layout, seed)
    assert data.train is not None
    train, valid = open_feed("data.train", data.train, data, layout, seed, checks_files=checks_files), None
    if data.valid is not None:
        valid = open_feed("data.valid", data.valid, data, layout, seed, is_validation=True, checks_files=checks_files)
        check_same_spec(train.data_spec, valid.data_spec, f"data.train={data.train}", f"data.valid={data.valid}")
    windows = [feed.windows for feed in (train, valid) if feed is not None]
    needed = sum(_needed_bytes(source, layout, ranks_per_node) for source in windows) if ranks_per_node else 0
    if needed <= (data.cache_bytes or Cache.max_bytes):
        return train, valid
    if data.cache_bytes is not None:
        problem = f"data.cache_bytes={data.cache_bytes:,} is too small for a node's share of data.lanes={data.lanes:,}"
        raise ConfigError(f"{problem}; use at least {needed:,}, or leave it out")
    return open_feeds(data.model_copy(update={"cache_bytes": needed}), layout, seed, checks_files=False)


def _factory_feeds(factory: str, data: DataConfig, layout: Layout, seed: int) -> tuple[Feed, Feed | None]:
    """Return the feeds of a user's function: rows or windows to train on, or a pair with those for validation."""
    name = f"data.factory={factory!r}"
    function = load_object("data.factory", factory)
    try:
        sources = function() if callable(function) else function
    except StrettoError as error:
        raise type(error)(f"{name}: {error}") from None
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises
        reason = class_and_reason(error)
        raise ConfigError(f"{name} failed ({reason}); fix the function, which is called without arguments") from None
    train, valid = sources if isinstance(sources, tuple) and len(sources) == 2 else (sources, None)
    if train is None:
        raise ConfigError(f"{name} returned None for training; return rows or windows")
    feeds = [_source_feed(name, source, data, seed) for source in (train, valid) if source is not None]
    _check_num_rows(feeds[0].windows, layout)
    for feed in feeds:
        feed.windows.share(0, layout.replicas, layout.micro_batches)  # raises if there are too few lanes
    if len(feeds) == 1:
        return feeds[0], None
    check_same_spec(feeds[0].data_spec, feeds[1].data_spec, f"{name} (training)", f"{name} (validation)")
    return feeds[0], feeds[1]


def _source_feed(name: str, source: object, data: DataConfig, seed: int) -> Feed:
    if isinstance(source, Items):
        _check_unused_fields(data, "batches", has_channels=False)
        if data.context is not None:  # only rows of a store are cut; those in memory have `cut`
            raise ConfigError(f"data.context={data.context} has no effect with {name}; leave it out")
        try:
            source = Batches(source, data.budget, data.max_rows, data.row_multiple, seed)
        except DataError as error:
            raise DataError(f"{name}: {error}") from None
    elif isinstance(source, WindowSource):
        field = next((field for field in _FEED_KINDS_BY_FIELD if _is_set(data, field)), None)
        if field is not None:
            problem = f"data.{field}={getattr(data, field)!r} has no effect, since {name} returns windows"
            raise ConfigError(f"{problem}; leave it out, or return rows")
    if not isinstance(source, WindowSource):
        raise ConfigError(
            f"{name} returned an object of type {type(source).__name__}; return rows, as stretto.data.from_arrays "
            "does, or windows, such as stretto.data.Batches, or a pair for training and validation"
        )
    items = source.items if isinstance(source, Batches) else None
    data_spec = DataSpec(source.task)
    if items is not None:
        data_spec = replace(data_spec, labels=items.labels, categories=items.categories)
    return Feed(source, data_spec, "" if items is None else items.digest)


def open_feed(
    field: str,
    location: str | Path,
    data: DataConfig,
    layout: Layout,
    seed: int,
    *,
    is_validation: bool = False,
    checks_files: bool = True,
) -> Feed:
    """Return the feed of the data at `location`; a DataError begins with `field`."""
    cache = Cache(data.cache, data.cache_bytes or Cache.max_bytes, data.retry_seconds)
    # Validation windows shrink until this many lanes fit. None: training data, where too little data is an error.
    min_rows = layout.num_global_micro_batches if is_validation else None
    try:
        store = Store.open(location, cache, checks_files=checks_files)
        if store.kind == CorpusFields.kind:
            feed = _corpus_feed(Corpus.from_store(store), data, min_rows)
        else:
            feed = _sequence_feed(Sequences.from_store(store), data, seed, min_rows)
        if not is_validation:
            _check_num_rows(feed.windows, layout)
    except DataError as error:
        is_relative = not is_remote(location) and not Path(location).is_absolute()
        where = f" (in {Path.cwd()})" if is_relative else ""
        raise DataError(f"{field}={location}{where}: {error}") from None
    feed.windows.share(
        0, layout.replicas, layout.micro_batches
    )  # raises if data.lanes is too small: not about the data
    return replace(feed, digest=store.digest)


def _check_num_rows(windows: WindowSource, layout: Layout) -> None:
    """Raise if a layout needs more rows than the training data has; validation batches are padded with blank rows."""
    if isinstance(windows, Batches) and not windows.has_rows(layout.num_global_micro_batches):
        raise DataError(
            f"layout.replicas={layout.replicas} x layout.micro_batches={layout.micro_batches} exceeds the "
            f"{windows.num_rows:,} rows of the data; use fewer replicas or micro-batches, or more data"
        )


def _needed_bytes(windows: WindowSource, layout: Layout, ranks_per_node: int) -> int:
    """Return the size of a cache that keeps what a node's lanes read again: pages, each for many windows."""
    if not isinstance(windows, Lanes | DocumentLanes):
        return 0
    store = windows.corpus.store if isinstance(windows, Lanes) else windows.sequences.store
    if not is_remote(store.location):
        return 0
    num_bytes = sum(file.num_bytes for file in store.files)
    replicas = _replicas_per_node(layout, ranks_per_node)
    needed = -(-windows.lanes * replicas // layout.replicas) * PAGE_BYTES
    if isinstance(windows, DocumentLanes):
        # All lanes read documents of one pool: its runs, which start and end within a page of values and one of ends.
        pools = windows.order.pools
        num_sections = min(pools.num_sections, -(-pools.num_sections * replicas // layout.replicas) + 1)
        pool_bytes = num_bytes // (pools.num_sections * pools.num_pools) + 4 * pools.num_runs * PAGE_BYTES
        needed = min(2 * needed, num_sections * pool_bytes)
    return int(min(needed, num_bytes) / KEPT_FRACTION)


def _replicas_per_node(layout: Layout, ranks_per_node: int) -> int:
    """Return of how many replicas a node has ranks, at most."""
    size = layout.num_ranks // layout.replicas if layout.adjacent == "stages" else 1
    # The first rank of a node is at most `size - gcd` ranks after the first one of its replica.
    return min(layout.replicas, -(-(ranks_per_node + size - gcd(ranks_per_node, size)) // size))


def _check_unused_fields(data: DataConfig, kind: str, has_channels: bool, has_values: bool = False) -> None:
    """Raise if a field is set that has no effect with this kind of feed, or on data without channels.

    `has_values` says whether the targets are values, which `data.scale` scales too.
    """
    for name, kinds in _FEED_KINDS_BY_FIELD.items():
        if not _is_set(data, name):
            continue
        value = getattr(data, name)
        # Without data.feed, data.context decides between "lanes" and "forecast" for series, so name it as the remedy.
        if name in ("stride", "every_step") and data.feed is None and has_channels and kind == "lanes":
            raise ConfigError(
                f"data.{name}={value!r} needs data.context; set it to how many time steps the network sees"
            )
        if kind not in kinds or (name in _CHANNEL_FIELDS and not has_channels and not (name == "scale" and has_values)):
            reason = f"with data.feed={kind!r}" if kind not in kinds else "on data without channels"
            raise ConfigError(f"data.{name}={value!r} has no effect {reason}; leave it out")


def _is_set(data: DataConfig, name: str) -> bool:
    return bool(getattr(data, name) != DataConfig.model_fields[name].default)


def _corpus_feed(corpus: Corpus, data: DataConfig, min_rows: int | None) -> Feed:
    if data.feed not in (None, "lanes"):
        raise ConfigError(f"data.feed={data.feed!r} needs sequences, but a corpus is a single long text; use lanes")
    if min_rows is None:
        _check_unused_fields(data, "lanes", has_channels=False)
        windows = Lanes(corpus, data.lanes, data.window)
    else:
        windows = Lanes.fitting(corpus, data.lanes, data.window, min_rows)
    return Feed(windows, DataSpec(windows.task, corpus.vocabulary))


def _sequence_feed(sequences: Sequences, data: DataConfig, seed: int, min_rows: int | None) -> Feed:
    values, targets = sequences.fields.values, sequences.fields.targets
    channels = values if isinstance(values, Channels) else None
    kind = data.feed or _default_feed(sequences, data)
    if min_rows is None:
        _check_unused_fields(data, kind, channels is not None, isinstance(targets, TargetValues))
    forecast = None
    if kind == "forecast" or (kind == "lanes" and channels is not None):
        forecast = make_forecast_transform(sequences, data)
    windows: WindowSource
    if kind == "lanes":
        if min_rows is None:
            windows = DocumentLanes(sequences, data.lanes, data.window, forecast, seed)
        else:
            windows = DocumentLanes.fitting(sequences, data.lanes, data.window, forecast, seed, min_rows)
    else:
        items = _items(sequences, data, forecast, is_validation=min_rows is not None)
        windows = Batches(items, data.budget, data.max_rows, data.row_multiple, seed)
    data_spec = DataSpec(windows.task, sequences.vocabulary, channels=channels, origin=sequences.fields.origin)
    if channels is not None:
        data_spec = replace(data_spec, categories=channels.categories)
    target_std = () if forecast is None else forecast.target_std
    if targets is not None and windows.task.targets == targets.kind:
        if isinstance(targets, TargetValues):
            data_spec = replace(data_spec, target_values=targets)
            target_std = targets.std if is_scaled(data) else ()
        else:
            data_spec = replace(data_spec, labels=targets.names)
    return Feed(windows, data_spec, target_std=target_std)


def _default_feed(sequences: Sequences, data: DataConfig) -> str:
    if isinstance(sequences.fields.values, Channels) and sequences.fields.targets is None:
        return "lanes" if data.context is None else "forecast"
    return "batches"


def _items(sequences: Sequences, data: DataConfig, forecast: ForecastTransform | None, *, is_validation: bool) -> Items:
    if forecast is not None:
        if data.context is None:
            raise ConfigError("data.feed='forecast' needs data.context; set it to how many time steps the network sees")
        # Validation has targets only at the last time step of a window, where a forecast would be made.
        return SlidingWindows(sequences, forecast, data.context, data.stride, data.every_step and not is_validation)
    if sequences.fields.targets is None:
        if data.context is not None:
            raise ConfigError(f"data.context={data.context} has no effect on tokens without targets; leave it out")
        return NextTokenItems(sequences)
    if data.context is not None:
        return CutLabeledItems(sequences, data.masks, is_scaled(data), data.context)
    return LabeledItems(sequences, data.masks, is_scaled(data))


def make_forecast_transform(sequences: Sequences, data: DataConfig) -> ForecastTransform:
    """Return the transform of series into inputs and targets that a run's config describes."""
    return ForecastTransform.from_sequences(
        sequences,
        data.horizon,
        season=data.season,
        targets=data.targets,
        masks=data.masks,
        scale=is_scaled(data),
        known_future=data.known_future,
        static=data.static,
    )


def is_scaled(data: DataConfig) -> bool:
    """Return whether channels are scaled with the mean and std of the training data."""
    return data.scale == "standard"
