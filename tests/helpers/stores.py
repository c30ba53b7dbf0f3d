"""Stores of sequences for tests, written from arrays without `stretto prepare`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.data import Sequences
from stretto.store.file_writer import write_file
from stretto.store.index import write_index
from stretto.store.sequences import CHANNEL_DTYPE, CLASS_DTYPE, END_DTYPE, SequencesFields
from stretto.store.vocabulary import token_dtype


def write_tokens(
    folder: Path,
    shards: Sequence[Sequence[Sequence[int]]],
    num_tokens: int,
    labels: Sequence[Sequence[int]] = (),
    per_step: bool = False,
) -> Sequences:
    """Write sequences of tokens, shard by shard, with labels if there are any: one per sequence or time step."""
    dtype = token_dtype(num_tokens)
    arrays = [[np.array(row, dtype) for row in shard] for shard in shards]
    names = [str(label) for label in range(1 + max((max(shard) for shard in labels), default=0))]
    fields = {
        "values": {"type": "tokens", "num_tokens": num_tokens},
        "targets": {"type": "classes", "names": names, "per_step": per_step} if labels else None,
    }
    return _write(folder, arrays, fields, labels)


def write_series(folder: Path, shards: Sequence[Sequence[NDArray[np.float32]]]) -> Sequences:
    """Write series `[steps, channels]`, shard by shard, with their own mean and standard deviation."""
    values = np.concatenate([series for shard in shards for series in shard]).astype(np.float64)
    fields = {
        "values": {
            "type": "channels",
            "names": [f"c{channel}" for channel in range(values.shape[1])],
            "mean": np.nanmean(values, axis=0).tolist(),
            "std": np.nanstd(values, axis=0).tolist(),
        }
    }
    return _write(folder, [[series.astype(CHANNEL_DTYPE) for series in shard] for shard in shards], fields, ())


def rows_of(store: Sequences) -> list[Any]:
    """Return all sequences of a store, as lists."""
    rows = [(shard, number) for shard, size in enumerate(store.shard_sizes) for number in range(size)]
    return [steps.tolist() for steps in store.read(store.step_ranges(rows))]


def _write(
    folder: Path,
    shards: Sequence[Sequence[NDArray[np.generic]]],
    fields: Mapping[str, object],
    labels: Sequence[Sequence[int]],
) -> Sequences:
    folder.mkdir(parents=True)
    files, sizes = [], []
    for index, shard in enumerate(shards):
        ends = np.cumsum([len(row) for row in shard])
        files.append(write_file(folder / f"values-{index:05}.bin", np.concatenate(shard).tobytes()))
        files.append(write_file(folder / f"ends-{index:05}.bin", ends.astype(END_DTYPE).tobytes()))
        if labels:
            files.append(write_file(folder / f"targets-{index:05}.bin", np.array(labels[index], CLASS_DTYPE).tobytes()))
        longest = max(len(row) for row in shard)
        sizes.append({"num_sequences": len(shard), "num_steps": int(ends[-1]), "longest": longest})
    write_index(folder, SequencesFields.kind, {**fields, "shards": sizes}, files)
    return Sequences.open(folder)
