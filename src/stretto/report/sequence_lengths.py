"""Lengths: how long the sequences of a run's training data are, and how much of its batches was padding."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import StrettoError
from stretto.base.remote import is_remote
from stretto.report.chart import Axes, Line, histogram_chart, line_chart
from stretto.report.formatting import format_count, format_percent
from stretto.report.markup import Html, tag
from stretto.report.page import figure, note, section
from stretto.report.record import Record
from stretto.report.ticks import Scale, linear, logarithmic
from stretto.store.corpus import KIND as CORPUS
from stretto.store.corpus import Corpus
from stretto.store.index import INDEX, Store
from stretto.store.sequences import Sequences

_MAX_SAMPLES, _NUM_BLOCKS, _NUM_BINS = 1 << 20, 64, 40


@dataclass(frozen=True)
class LengthSample:
    """The lengths of some or all sequences of a store."""

    values: NDArray[np.int64]
    num_sequences: int
    num_steps: int


def lengths_section(record: Record, data_digest: str | None) -> Html:
    """Return what is known of lengths; `data` is the digest of the data that was trained on."""
    pictures, words = [], ""
    try:
        found = _find_lengths(record, data_digest)
    except (StrettoError, OSError) as error:
        words = f"The training data can't be read now: {error}."
        found = None
    if isinstance(found, str):
        words = found
    elif found is not None:
        pictures.append(figure(_histogram(found)))
        words = _describe(found)
    padding = record.steps.mean("padding")
    if record.padding == 0:
        words += " No batch had any padding."
    elif np.isfinite(padding).any():
        pictures.append(figure(_padding_chart(record)))
        words += f" Of the batches' positions, {format_percent(record.padding)} were padding, in the mean over steps."
    grid = tag("div", *pictures, class_="grid") if pictures else None
    return section("lengths", "Lengths and padding", note(words) if words else None, grid)


def _find_lengths(record: Record, data_digest: str | None) -> LengthSample | str | None:
    """The lengths of the training data; or a sentence, where there are none to show."""
    if record.config is None:
        return "The run's config can't be read, so its data is not known."
    location = record.config.data.train
    if is_remote(location):
        return f"The training data, {location}, is in object storage, which a report does not ask."
    path = _locate_data(record.folder, location)
    if path is None:
        return f"The training data, {location}, is not there any more."
    store = Store.open(path)
    if data_digest is not None and store.digest != data_digest:
        return f"What is in {location} now is not the data that the run was trained on."
    if store.kind == CORPUS:
        corpus = Corpus.from_store(store)
        return f"The training data is one text of {corpus.num_tokens:,} tokens, cut into lanes of equal length."
    return read_lengths(Sequences.from_store(store))


def read_lengths(sequences: Sequences, max_samples: int = _MAX_SAMPLES) -> LengthSample:
    """Read the lengths of a store's sequences; of a large one, of stretches that lie evenly in each shard."""
    part = min(1.0, max_samples / sequences.num_sequences)
    found = []
    for shard, size in enumerate(sequences.shard_sizes):
        blocks = 1 if part == 1 else min(_NUM_BLOCKS, size)
        each = size if part == 1 else max(1, math.floor(size * part / blocks))
        for block in range(blocks):
            start = size * block // blocks
            found.append(np.diff(sequences.ends(shard, start, min(start + each, size))))
    return LengthSample(np.concatenate(found), sequences.num_sequences, sequences.num_steps)


def _locate_data(folder: Path, location: str) -> Path | None:
    """Where the data lies: seen from here, or from where the run may have been started."""
    places = [Path(location)]
    if not places[0].is_absolute():
        places += [parent / location for parent in folder.resolve().parents]
    return next((place for place in places if (place / INDEX).is_file()), None)


def _describe(found: LengthSample) -> str:
    values = found.values
    sampled = f" (the picture is of {len(values):,} of them)" if len(values) < found.num_sequences else ""
    return (
        f"{found.num_sequences:,} sequences with {format_count(found.num_steps)} steps{sampled}: half of them have at most "
        f"{int(np.median(values)):,} steps, 95 % at most {int(np.percentile(values, 95)):,}, the longest "
        f"{int(values.max()):,}."
    )


def _histogram(found: LengthSample) -> Html:
    low, high = int(found.values.min()), int(found.values.max())
    scale: Scale
    if high > 50 * low:
        scale = logarithmic(low, high, 6)
        edges = np.geomspace(scale.low, scale.high, _NUM_BINS + 1)
    else:
        # Bars of whole steps, so that none is lower for holding fewer of them.
        width = max(1, -(-(high - low + 1) // _NUM_BINS))
        edges = np.arange(low, high + width + 1, width, dtype=np.float64)
        scale = linear(float(edges[0]), float(edges[-1]), 6, is_tight=True)
    counts = np.histogram(found.values, edges)[0]
    median = float(np.median(found.values))
    marks = [(median, f"half are shorter than {median:,.0f} steps")]
    axes = Axes("Lengths of the training data", "steps of a sequence", "sequences", marks=marks)
    return histogram_chart(axes, edges.tolist(), counts.tolist(), scale)


def _padding_chart(record: Record) -> Html:
    steps = record.steps
    bands = (100 * steps.min("padding"), 100 * steps.max("padding")) if steps.bucket_size > 1 else ((), ())
    line = Line("", 0, steps.mean("step").tolist(), (100 * steps.mean("padding")).tolist(), *map(list, bands))
    return line_chart(Axes("Padding of each batch", "step", "% of positions", from_zero=True, is_integer=True), [line])
