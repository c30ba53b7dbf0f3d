"""Dropout as one Triton kernel: hashes keys, time steps and features, and scales or zeroes the input.

The mask has the same bits as `stretto.base.randomness.keep_mask`, and is never stored: the backward computes it again.
Imported only where Triton is installed; with `TRITON_INTERPRET=1` it runs on a CPU too, which is how it is tested.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.base.randomness import GOLDEN, MIX_A, MIX_B, WORD_A, WORD_B

_GOLDEN, _MIX_A, _MIX_B = tl.constexpr(GOLDEN), tl.constexpr(MIX_A), tl.constexpr(MIX_B)
_WORD_A, _WORD_B = tl.constexpr(WORD_A), tl.constexpr(WORD_B)
_ROWS_PER_TILE, _FEATURES_PER_TILE = 16, 128


@triton.jit
def _mix(keys):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    mixed = keys * _GOLDEN
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * _MIX_A
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * _MIX_B
    return mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)


@triton.jit
def _words(keys):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return ((_mix(keys) & 0xFFFFFFFF) - 0x80000000).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "batch", "num_features", "threshold"])  # type: ignore[untyped-decorator]
def _dropout(  # type: ignore[no-untyped-def]  # noqa: ANN202
    x,  # noqa: ANN001
    y,  # noqa: ANN001
    keys,  # noqa: ANN001
    times,  # noqa: ANN001
    num_rows,  # noqa: ANN001  # time steps x batch
    batch,  # noqa: ANN001
    num_features,  # noqa: ANN001
    threshold,  # noqa: ANN001
    scale,  # noqa: ANN001
    is_locked: tl.constexpr,
    rows_per_tile: tl.constexpr,
    features_per_tile: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * rows_per_tile + tl.arange(0, rows_per_tile)
    features = tl.program_id(1).to(tl.int64) * features_per_tile + tl.arange(0, features_per_tile)
    row_keys = tl.load(keys + rows % batch, mask=rows < num_rows, other=0)
    if not is_locked:
        row_keys ^= _mix(tl.load(times + rows % batch, mask=rows < num_rows, other=0) + rows // batch)
    words = _words(row_keys)[:, None] ^ _words(features)[None, :]
    words ^= (words >> 16) & 0xFFFF
    words *= _WORD_A
    words ^= (words >> 15) & 0x1FFFF
    words *= _WORD_B
    offsets = rows[:, None] * num_features + features[None, :]
    inside = (rows < num_rows)[:, None] & (features < num_features)[None, :]
    values = tl.load(x + offsets, mask=inside, other=0)
    scaled = (values.to(tl.float32) * scale).to(values.dtype)
    tl.store(y + offsets, tl.where(words < threshold, scaled, 0), mask=inside)


def run_dropout(x: Tensor, keys: Tensor, times: Tensor | None, threshold: int, scale: float) -> Tensor:
    """Return `x` `[time, batch, *features]` with some features zeroed; without `times`, the same at all time steps."""
    x, y = x.contiguous(), x.new_empty(x.shape)
    num_rows, batch = x.shape[0] * x.shape[1], x.shape[1]
    num_features = x.numel() // max(num_rows, 1)
    grid = (triton.cdiv(num_rows, _ROWS_PER_TILE), triton.cdiv(num_features, _FEATURES_PER_TILE))
    if x.numel():
        keys, times, is_locked = keys.contiguous(), times if times is None else times.contiguous(), times is None
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # Triton uses the current device
            _dropout[grid](
                x, y, keys, keys if times is None else times, num_rows, batch, num_features, threshold, scale,
                is_locked=is_locked, rows_per_tile=_ROWS_PER_TILE, features_per_tile=_FEATURES_PER_TILE,
            )  # fmt: skip
    return y
