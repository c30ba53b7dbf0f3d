"""Sequence lengths of a run's training data, and the padding of its batches."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import StrettoError
from stretto.base.remote import is_remote
from stretto.report.chart import Line, histogram_chart, line_chart
from stretto.report.formatting import format_count, format_percent
from stretto.report.markup import Html, tag
from stretto.report.page import figure, note, section
from stretto.report.record import Record, StepHistory
from stretto.report.ticks import linear, logarithmic
from stretto.store.corpus import KIND as CORPUS
from stretto.store.corpus import Corpus
from stretto.store.index import INDEX, Store
from stretto.store.sequences import Sequences

_MAX_SAMPLES, _NUM_BLOCKS, _NUM_BINS = 1 << 20, 64, 40


@dataclass(frozen=True)
class LengthSample:
    """The lengths of all sequences of a store, or of a sample."""

    values: NDArray[np.int64]
    num_sequences: int
    num_steps: int


def lengths_section(record: Record, data_digest: str | None) -> Html:
    """Return the histogram of lengths and the padding; `data_digest` identifies the data the run was trained on."""
    try:
        lengths = _find_lengths(record, data_digest)
    except (StrettoError, OSError) as error:
        lengths = f"The training data can't be read: {error}."
    pictures = [] if isinstance(lengths, str) else [figure(_histogram(lengths))]
    words = lengths if isinstance(lengths, str) else _describe(lengths)
    padding = record.steps.padding
    if padding == 0:
        words += " No batch was padded."
    elif math.isfinite(padding):
        pictures.append(figure(_padding_chart(record.steps)))
        words += f" {format_percent(padding)} of the positions in a batch were padding, averaged over steps."
    grid = tag("div", *pictures, class_="grid") if pictures else None
    return section("lengths", "Sequence lengths and padding", note(words), grid)


def _find_lengths(record: Record, data_digest: str | None) -> LengthSample | str:
    """Return the lengths of the training data, or a sentence that says why there are none."""
    if record.config is None:
        return "The run's config can't be read, so its training data is unknown."
    location = record.config.data.train
    if is_remote(location):
        return f"The training data, {location}, is in object storage, which a report does not read."
    path = _locate_data(record.folder, location)
    if path is None:
        return f"The training data, {location}, no longer exists."
    store = Store.open(path)
    if data_digest is not None and store.digest != data_digest:
        return f"The data in {location} has changed since the run was trained on it."
    if store.kind == CORPUS:
        corpus = Corpus.from_store(store)
        return f"The training data is one text of {corpus.num_tokens:,} tokens, split into lanes of equal length."
    return read_lengths(Sequences.from_store(store))


def read_lengths(sequences: Sequences, max_samples: int = _MAX_SAMPLES) -> LengthSample:
    """Read the lengths of a store's sequences. A large store is sampled in blocks spread evenly over each shard."""
    fraction = min(1.0, max_samples / sequences.num_sequences)
    lengths = []
    for shard, size in enumerate(sequences.shard_sizes):
        num_blocks = 1 if fraction == 1 else min(_NUM_BLOCKS, size)
        block_size = size if fraction == 1 else max(1, math.floor(size * fraction / num_blocks))
        for block in range(num_blocks):
            start = size * block // num_blocks
            lengths.append(np.diff(sequences.ends(shard, start, min(start + block_size, size))))
    return LengthSample(np.concatenate(lengths), sequences.num_sequences, sequences.num_steps)


def _locate_data(folder: Path, location: str) -> Path | None:
    """Return where the data is, relative to here or to any folder the run may have been started from."""
    candidates = [Path(location)]
    if not candidates[0].is_absolute():
        candidates += [parent / location for parent in folder.resolve().parents]
    return next((path for path in candidates if (path / INDEX).is_file()), None)


def _describe(lengths: LengthSample) -> str:
    values = lengths.values
    sampled = f" (the histogram is a sample of {len(values):,})" if len(values) < lengths.num_sequences else ""
    median, high = (int(value) for value in np.percentile(values, (50, 95)))
    return (
        f"{lengths.num_sequences:,} sequences with {format_count(lengths.num_steps)} steps{sampled}. "
        f"Median length {median:,}, 95th percentile {high:,}, maximum {int(values.max()):,}."
    )


def _histogram(lengths: LengthSample) -> Html:
    low, high = int(lengths.values.min()), int(lengths.values.max())
    if high > 50 * low:
        scale = logarithmic(low, high, 6)
        edges = np.geomspace(scale.low, scale.high, _NUM_BINS + 1)
    else:
        # Bins hold whole numbers of steps, so that none is lower because it covers fewer lengths.
        width = max(1, -(-(high - low + 1) // _NUM_BINS))
        edges = np.arange(low, high + width + 1, width, dtype=np.float64)
        scale = linear(float(edges[0]), float(edges[-1]), 6, is_tight=True)
    counts = np.histogram(lengths.values, edges)[0]
    median = float(np.median(lengths.values))
    title, x_label = "Lengths of the training data", "steps per sequence"
    return histogram_chart(title, x_label, "sequences", edges.tolist(), counts.tolist(), scale, median)


def _padding_chart(steps: StepHistory) -> Html:
    series = steps.series
    limits = (100 * series.min("padding"), 100 * series.max("padding")) if series.bucket_size > 1 else ((), ())
    line = Line("", 0, [series.mean("step").tolist()], (100 * series.mean("padding")).tolist(), *map(list, limits))
    return line_chart("Padding of each batch", [line], unit="% of positions", from_zero=True)
