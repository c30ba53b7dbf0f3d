"""predict_arrays: a model's outputs for rows in memory."""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from stretto.base.device_copy import to_device
from stretto.base.window import Rows
from stretto.blocks.stack import Stack
from stretto.windows.row_inputs import ArrayRows, RowInputs


@torch.no_grad()
def predict_arrays(
    stack: Stack,
    inputs: ArrayRows,
    *,
    lengths: ArrayLike | Tensor | None = None,
    per_step: bool = False,
    max_rows: int = 256,
) -> NDArray[Any] | list[NDArray[Any]]:
    """Return a model's outputs for rows in memory, which are given as to `stretto.data.from_arrays`.

    The result is an array `[rows, outputs]` with the outputs at each row's last time step; with `per_step`, a list of
    arrays `[time, outputs]`, one per row. The model, which must be complete, runs on `max_rows` rows at once, on its
    device, from the initial state and without dropout.
    """
    rows = RowInputs.of(inputs, lengths)
    was_training = stack.training
    stack.eval()
    outputs: list[NDArray[Any]] = []
    for start in range(0, len(rows), max_rows):
        indices = range(start, min(start + max_rows, len(rows)))
        row_lengths = torch.from_numpy(rows.lengths[start : indices.stop])
        x = rows.read(indices, int(row_lengths.max()))
        lanes = torch.arange(len(indices))
        batch = Rows(lanes, row_lengths, torch.ones(len(indices), dtype=torch.bool), 0, stack.device, stack.dtype)
        x = to_device(x.to(stack.dtype) if x.is_floating_point() else x, stack.device)
        y, _ = stack(x, stack.begin(batch))
        y = y.float().cpu() if y.dtype == torch.bfloat16 else y.cpu()
        if per_step:
            outputs += [y[:length, index].numpy() for index, length in enumerate(row_lengths.tolist())]
        else:
            outputs.append(y[row_lengths - 1, lanes].numpy())
    stack.train(was_training)
    return outputs if per_step else np.concatenate(outputs)
