"""predict_arrays: a model's outputs for rows in memory."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from stretto.base.device_copy import to_device
from stretto.base.errors import ConfigError, DataError
from stretto.base.units import pluralize
from stretto.base.window import Rows
from stretto.blocks.embed_categories import EmbedCategories
from stretto.blocks.head_loss import class_outputs
from stretto.blocks.input_spec import block_input_spec
from stretto.blocks.stack import Stack
from stretto.serve.row_decoder import find_row_decoder
from stretto.train.feed import is_scaled
from stretto.train.trained_model import TrainedModel
from stretto.windows.items import InputItems, Items, SlidingWindows
from stretto.windows.row_inputs import ArrayRows, RowInputs

_Outputs = NDArray[Any] | list[NDArray[Any]]


@overload
def predict_arrays(
    model: Stack,
    inputs: ArrayRows | RowInputs | Items,
    *,
    lengths: ArrayLike | Tensor | None = ...,
    per_step: bool = ...,
    max_rows: int = ...,
) -> _Outputs: ...
@overload
def predict_arrays(
    model: TrainedModel,
    inputs: ArrayRows | RowInputs | Items,
    *,
    lengths: ArrayLike | Tensor | None = ...,
    per_step: bool = ...,
    beam: int | None = ...,
    max_rows: int = ...,
) -> _Outputs | list[list[str]]: ...
@torch.no_grad()
def predict_arrays(
    model: Stack | TrainedModel,
    inputs: ArrayRows | RowInputs | Items,
    *,
    lengths: ArrayLike | Tensor | None = None,
    per_step: bool = False,
    beam: int | None = None,
    max_rows: int = 256,
) -> NDArray[Any] | list[NDArray[Any]] | list[list[str]]:
    """Return a model's outputs for rows in memory, which are given as to `stretto.data.from_arrays`.

    The result is an array `[rows, outputs]` with the outputs at each row's last time step; with `per_step`, a list of
    arrays `[time, outputs]`, one per row; a model with strided blocks has fewer outputs than time steps. The model runs
    on `max_rows` rows at once, on its device, from the initial state and without dropout. If it was trained in several
    stages, `stretto.train.gather_model` gives the complete one.

    `inputs` can also be items, as a model is trained on (from `from_table`, or `LabeledItems`), or their `inputs`. A
    `TrainedModel` scales them as its run did, except the items of a store, which are scaled when they are read. Its
    predicted values, except forecasts, are in their units. If it was trained with CTC or a CRF, the result is a list
    with the names of each row's symbols or tags; CTC takes the most likely path, or the best of a prefix beam search of
    the width `beam`. With `per_step`, nothing is decoded; `ctc_greedy` and `ctc_beam_search` take such outputs, row by
    row.
    """
    decoder = find_row_decoder(model, beam) if isinstance(model, TrainedModel) and not per_step else None
    if beam is not None and decoder is None:
        raise ConfigError(
            f"beam={beam} is for a TrainedModel that is decoded (per_step=False); leave it out, and decode each row's "
            "outputs of per_step=True with stretto.serve.ctc_beam_search(outputs, beam)"
        )
    if lengths is not None and isinstance(inputs, Items | RowInputs):
        raise DataError("lengths can't be combined with inputs that have lengths of their own; leave it out")
    if isinstance(inputs, Items):
        _check_categories(model, inputs)
        parts = _item_parts(inputs, max_rows)
    else:
        rows = inputs if isinstance(inputs, RowInputs) else RowInputs.of(inputs, lengths)
        parts = ((rows.lengths[i : i + max_rows], _reader(rows, i, max_rows)) for i in range(0, len(rows), max_rows))
    outputs = _run_parts(model if isinstance(model, Stack) else _unit_stack(model, inputs), parts)
    if decoder is None and not per_step:
        return np.concatenate([y[sizes - 1, torch.arange(len(sizes))].numpy() for sizes, y in outputs])
    per_row = (y[:size, row] for sizes, y in outputs for row, size in enumerate(sizes.tolist()))
    return [y.numpy() for y in per_row] if decoder is None else [decoder.decode(y).names for y in per_row]


def _run_parts(stack: Stack, parts: "Iterable[_Part]") -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the numbers of outputs of each part's rows and the outputs, `[time, rows, ...]` on the CPU."""
    stack.check_complete()
    was_training = stack.training
    stack.eval()
    for part_lengths, read in parts:
        row_lengths, lanes = torch.from_numpy(np.ascontiguousarray(part_lengths)), torch.arange(len(part_lengths))
        x = read(int(row_lengths.max()))
        _check_width(stack, x)
        batch = Rows(lanes, row_lengths, torch.ones(len(lanes), dtype=torch.bool), 0, stack.device, stack.dtype)
        x = to_device(x.to(stack.dtype) if x.is_floating_point() else x, stack.device)
        y, _ = stack(x, stack.begin(batch))
        y = class_outputs(stack.loss, y)
        num_outputs = batch.after_stride(stack.stride).lengths
        yield num_outputs, y.float().cpu() if y.dtype == torch.bfloat16 else y.cpu()
    stack.train(was_training)


def _check_categories(model: Stack | TrainedModel, items: Items) -> None:
    """Raise if the model would take the code of a category for another one."""
    if isinstance(model, TrainedModel) and dict(items.categories) != dict(model.data_spec.categories):
        names, expected = items.categories, model.data_spec.categories
        column = next(name for name in (*expected, *names) if names.get(name) != expected.get(name))
        raise DataError(
            f"the categories of {column!r} in inputs are not those that the model was trained on; pass "
            "classes=model.data_spec.categories to from_table, or prepare the store with like=FOLDER"
        )
    first = (model if isinstance(model, Stack) else model.stack)[0]
    # With another number of inputs, they are not comparable; `_check_width` raises unless a block adds masks.
    if not isinstance(first, EmbedCategories) or first.num_inputs != items.task.num_inputs:
        return
    if set(first.categories) != set(items.task.categories):
        raise DataError(
            f"inputs have the categories {items.task.categories}, but the model embeds {first.categories}; use the "
            "columns that it was trained on, and pass the categories of its training rows as classes to from_table"
        )


def _unit_stack(model: TrainedModel, inputs: object) -> Stack:
    """Return a run's model with the blocks that scale its inputs, unless they are scaled, and unscale its outputs."""
    are_scaled = isinstance(inputs, InputItems | SlidingWindows)
    if not are_scaled or model.data_spec.channels is None:
        return model.raw_stack
    scale = is_scaled(model.config.data)
    if isinstance(inputs, InputItems) and inputs.scale != scale:
        raise DataError(f"inputs have scale={inputs.scale}, but the run has {scale}; use scale={scale}")
    return model.raw_stack[1:].train(model.stack.training)


# The lengths of some rows, and a function that reads them as `[num_steps, rows, ...]`.
_Part = tuple[NDArray[np.int64], Callable[[int], Tensor]]


def _reader(rows: RowInputs, start: int, max_rows: int) -> Callable[[int], Tensor]:
    return lambda num_steps: rows.read(range(start, min(start + max_rows, len(rows))), num_steps)


def _item_parts(items: Items, max_rows: int) -> Iterator[_Part]:
    def reader(shard: int, start: int, stop: int) -> Callable[[int], Tensor]:
        def read(num_steps: int) -> Tensor:
            row_ids = [(shard, index) for index in range(start, stop)]
            x, _ = items.read(row_ids, num_steps, inputs=True, targets=False)
            assert x is not None
            return x

        return read

    for shard, size in enumerate(items.shard_sizes):
        for start in range(0, size, max_rows):
            stop = min(start + max_rows, size)
            yield items.lengths(shard, start, stop), reader(shard, start, stop)


def _check_width(stack: Stack, x: Tensor) -> None:
    """Raise unless inputs `[time, rows, ...]` fit the first block, as far as its inputs are known."""
    spec = block_input_spec(stack)
    if spec is None or spec.num_tokens is not None or not x.is_floating_point() or x.shape[2:] == spec.shape:
        return
    num_channels = x.shape[2]
    remedy = "if x is one row, pass [x]" if num_channels == 1 else "use the channels that it was trained on"
    raise DataError(
        f"inputs have {pluralize(num_channels, 'channel')} per time step, but the model needs {spec.shape[0]}; {remedy}"
    )
