"""Sequence lengths of a run's training data, and the padding of its batches."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import StrettoError
from stretto.base.remote import is_remote
from stretto.base.units import pluralize
from stretto.report.chart import Line, histogram_chart, line_chart
from stretto.report.formatting import format_count, format_percent
from stretto.report.markup import Html, tag
from stretto.report.page import figure, note, section
from stretto.report.record import Record, StepHistory
from stretto.report.ticks import linear, logarithmic
from stretto.store.corpus import Corpus, CorpusFields
from stretto.store.index import INDEX, Store
from stretto.store.sequences import Sequences

# The approximate maximum number of lengths to read, the segments read in each shard, and the bins of the histogram.
_MAX_SAMPLES, _SEGMENTS_PER_SHARD, _NUM_BINS = 1 << 20, 64, 40


@dataclass(frozen=True)
class LengthSample:
    """The lengths of a store's sequences, in time steps, or of a sample of them."""

    values: NDArray[np.int64]
    num_sequences: int  # this and the next two describe all sequences, even if `values` is a sample
    num_steps: int
    longest: int


def lengths_section(record: Record, data_digest: str | None) -> Html:
    """Return the section with charts of lengths and padding; `data_digest` identifies the data trained on."""
    try:
        lengths, text = _find_lengths(record, data_digest)
    except (StrettoError, OSError) as error:
        lengths, text = None, f"The training data can't be read: {error}."
    has_several = lengths is not None and lengths.num_sequences > 1
    figures = [figure(_histogram(lengths))] if lengths is not None and has_several else []
    padding = record.steps.padding
    if padding == 0:
        text += " No batch was padded."
    elif math.isfinite(padding):
        figures.append(figure(_padding_chart(record.steps)))
        text += f" {format_percent(padding)} of the positions in a batch were padding, averaged over training steps."
    grid = tag("div", *figures, class_="grid") if figures else None
    return section("lengths", "Sequence lengths and padding", note(text), grid)


def _find_lengths(record: Record, data_digest: str | None) -> tuple[LengthSample | None, str]:
    """Return the lengths of the training data and a description of them; or None and why there are none."""
    if record.config is None:
        return None, "The run's config can't be read, so its training data is unknown."
    location = record.config.data.train
    if location is None:
        return None, f"The training data comes from data.factory={record.config.data.factory}, not from a store."
    if is_remote(location):
        return None, f"The training data, {location}, is in object storage, which a report does not read."
    path = _locate_data(record.folder, location)
    if path is None:
        return None, f"The training data, {location}, was not found."
    store = Store.open(path)
    if data_digest is not None and store.digest != data_digest:
        return None, f"The data in {location} has changed since it was used for training."
    if store.kind == CorpusFields.kind:
        corpus = Corpus.from_store(store)
        return None, f"The training data is a text of {corpus.num_tokens:,} tokens, split into streams of equal length."
    lengths = read_lengths(Sequences.from_store(store))
    return lengths, _describe(lengths)


def read_lengths(sequences: Sequences, max_samples: int = _MAX_SAMPLES) -> LengthSample:
    """Read the lengths of a store's sequences; a large store is sampled in segments spread evenly over each shard."""
    fraction = min(1.0, max_samples / sequences.num_sequences)
    lengths = []
    for shard, size in enumerate(sequences.shard_sizes):
        num_segments = 1 if fraction == 1 else min(_SEGMENTS_PER_SHARD, size)
        segment_size = size if fraction == 1 else max(1, math.floor(size * fraction / num_segments))
        for segment in range(num_segments):
            start = size * segment // num_segments
            lengths.append(np.diff(sequences.boundaries(shard, start, min(start + segment_size, size))))
    return LengthSample(np.concatenate(lengths), sequences.num_sequences, sequences.num_steps, sequences.longest)


def _locate_data(folder: Path, location: str) -> Path | None:
    """Return the data's folder or None; a relative path can be in the working directory or a parent of `folder`."""
    candidates = [Path(location)]
    if not candidates[0].is_absolute():
        candidates += [parent / location for parent in folder.resolve().parents]
    return next((path for path in candidates if (path / INDEX).is_file()), None)


def _describe(lengths: LengthSample) -> str:
    values = lengths.values
    sampled = f" in a sample of {len(values):,}" if len(values) < lengths.num_sequences else ""
    median, p95 = (int(value) for value in np.percentile(values, (50, 95)))
    return (
        f"{pluralize(lengths.num_sequences, 'sequence')} with {format_count(lengths.num_steps)} time steps in total; "
        f"the longest has {lengths.longest:,}. The median length{sampled} is {median:,}, the 95th percentile {p95:,}."
    )


def _histogram(lengths: LengthSample) -> Html:
    low, high = int(lengths.values.min()), int(lengths.values.max())
    if high > 50 * low:
        scale = logarithmic(low, high, 6)
        edges = np.geomspace(scale.low, scale.high, _NUM_BINS + 1)
    else:
        # All bins cover the same number of possible lengths; otherwise some would look lower than their neighbors.
        width = max(1, -(-(high - low + 1) // _NUM_BINS))
        edges = np.arange(low, high + width + 1, width, dtype=np.float64)
        scale = linear(float(edges[0]), float(edges[-1]), 6, is_tight=True)
    counts = np.histogram(lengths.values, edges)[0]
    median = float(np.median(lengths.values))
    title, labels = "Sequence lengths in the training data", {"x_label": "time steps per sequence", "unit": "sequences"}
    return histogram_chart(title, edges.tolist(), counts.tolist(), x=scale, median=median, **labels)


def _padding_chart(steps: StepHistory) -> Html:
    series = steps.series
    extremes = (100 * series.min("padding"), 100 * series.max("padding")) if series.bucket_size > 1 else ((), ())
    line = Line("", 0, [series.mean("step").tolist()], (100 * series.mean("padding")).tolist(), *map(list, extremes))
    return line_chart("Padding of each batch", [line], unit="% of positions", from_zero=True)
