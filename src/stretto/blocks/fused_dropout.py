"""fused_dropout: zeroes features in one kernel on GPUs that Triton supports, instead of about 20."""

import logging
import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from stretto.base.randomness import keep_threshold
from stretto.base.reason import last_line

_log = logging.getLogger(__name__)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def has_kernel(x: Tensor) -> bool:
    """Return whether the kernel can run on `x`: on a GPU, or in Triton's interpreter."""
    return (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") and x.dtype in _DTYPES and _runs(x.device)


@cache
def _runs(device: torch.device) -> bool:
    """Run the kernel once; return whether it works. Triton needs a C compiler, for one, which not every image has."""
    if find_spec("triton") is None:
        return False
    try:
        _run(torch.zeros(1, 1, 1, device=device), torch.zeros(1, dtype=torch.int64, device=device), None, 0.5)
    except Exception as error:  # noqa: BLE001
        _log.warning("dropout runs as torch operations, since Triton can't compile its kernel: %s", last_line(error))
        return False
    return True


def fused_dropout(x: Tensor, keys: Tensor, times: Tensor | None, keep: float) -> Tensor:
    """Zero the features of `x` that the mask of (keys, times) doesn't keep, and scale the others by `1 / keep`.

    `keys` and `times` have one value per row; `times` is the time step that `x` starts at. Without it, the mask is the
    same at all time steps.
    """
    dropped: Tensor = _FusedDropout.apply(x, keys, times, keep)  # type: ignore[no-untyped-call]
    return dropped


class _FusedDropout(torch.autograd.Function):
    """The backward applies the same mask, which is computed again rather than saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, times: Tensor | None, keep: float) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(keys, times)
        ctx.keep = keep
        return _run(x, keys, times, keep)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        keys, times = ctx.saved_tensors
        return _run(gradients[0], keys, times, ctx.keep), None, None, None


def _run(x: Tensor, keys: Tensor, times: Tensor | None, keep: float) -> Tensor:
    from stretto.blocks.dropout_kernel import run_dropout

    return run_dropout(x, keys, times, keep_threshold(keep), 1 / keep)
