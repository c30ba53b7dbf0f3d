"""Lines that describe prepared data."""

from typing import TYPE_CHECKING

import numpy as np

from stretto.base.units import pluralize
from stretto.store.corpus import Corpus
from stretto.store.sequences import Channels, Classes, Sequences

if TYPE_CHECKING:
    from stretto.prepare.row_reader import SkippedRows

_MAX_SEQUENCES = 10**7  # with more, reading all lengths only for their minimum and median takes too long

_MAX_COUNTED = 10**9  # with more time steps, reading all targets takes too long
_MAX_NAMES = 20  # of classes that are listed


def describe_store(store: Corpus | Sequences) -> str:
    """Return a description of a store, in one line."""
    return _describe_corpus(store) if isinstance(store, Corpus) else _describe_sequences(store)


def describe_classes(store: Sequences) -> str:
    """Return the names of a store's classes with the number of targets that each has, in the order of the classes."""
    targets = store.fields.targets
    assert isinstance(targets, Classes), "the caller checks"
    first = 1 if targets.own_length else 0  # 0 is the blank of CTC
    if store.num_steps > _MAX_COUNTED:
        names = ", ".join(map(repr, targets.names[first : first + _MAX_NAMES]))
        return f"classes: {names}{', ...' if len(targets.names) > first + _MAX_NAMES else ''}"
    *counts, num_missing = store.count_classes().tolist()
    pairs = list(zip(targets.names, counts, strict=True))[first:]
    listed = ", ".join(f"{name!r} {count:,}" for name, count in pairs[:_MAX_NAMES])
    more = f", and {len(pairs) - _MAX_NAMES:,} more" if len(pairs) > _MAX_NAMES else ""
    missing = f"; {num_missing:,} have none" if num_missing else ""
    return f"classes: {listed}{more}{missing}"


def describe_skipped(rows: "SkippedRows") -> str:
    """Return how many rows were skipped, and why the first was."""
    return f"skipped {rows.summary}; the first: {rows.first}"


def _describe_corpus(corpus: Corpus) -> str:
    knows_all = corpus.vocabulary.unknown_token is None
    unknown = "" if knows_all else f" ({corpus.num_unknown / corpus.num_tokens:.1%} of tokens unknown)"
    return (
        f"{corpus.location}: {corpus.num_tokens:,} tokens, {corpus.vocabulary.level} vocabulary of "
        f"{len(corpus.vocabulary):,}{unknown}, from {corpus.num_bytes:,} bytes of text"
    )


def _describe_sequences(store: Sequences) -> str:
    values = store.fields.values
    if isinstance(values, Channels):
        described = [_describe_channel(values, name) for name in values.names[:5]]
        names = ", ".join(described) + (", ..." if len(values.names) > 5 else "")
        contents = f"{pluralize(len(values.names), 'channel')} ({names})"
    elif store.vocabulary is not None:
        contents = f"{store.vocabulary.level} vocabulary of {values.num_tokens:,}"
    else:
        contents = f"token ids below {values.num_tokens:,}"
    return (
        f"{store.location}: {pluralize(store.num_sequences, 'sequence')} of {_describe_lengths(store)}, "
        f"{pluralize(store.num_steps, 'step')} in total, {contents}{_describe_targets(store)}"
    )


def _describe_channel(channels: Channels, name: str) -> str:
    categories = channels.categories.get(name)
    return name if categories is None else f"{name}: {len(categories):,} categories"


def _describe_targets(store: Sequences) -> str:
    targets = store.fields.targets
    if targets is None:
        return ""
    per_step = " per time step" if targets.per_step else ""
    if targets.own_length:
        return f", target sequences of {len(targets.names) - 1:,} symbols"
    if isinstance(targets, Classes):
        return f", {len(targets.names):,} classes{per_step}"
    names = ", ".join(targets.names[:5]) + (", ..." if len(targets.names) > 5 else "")
    return f", {pluralize(len(targets.names), 'value')} to predict{per_step} ({names})"


def _describe_lengths(store: Sequences) -> str:
    if store.num_sequences > _MAX_SEQUENCES:
        return f"up to {pluralize(store.longest, 'step')}"
    shard_lengths = [np.diff(store.boundaries(shard, 0, size)) for shard, size in enumerate(store.shard_sizes)]
    lengths = np.concatenate(shard_lengths)
    if lengths.min() == lengths.max():
        return pluralize(int(lengths.max()), "step")
    return f"{lengths.min():,} to {lengths.max():,} steps (median {int(np.median(lengths)):,})"
