"""Precision: the dtype that blocks compute in; weights, losses and states are stored in the model's own dtype."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from stretto.base.errors import ConfigError
from stretto.blocks.activation_penalty import ActivationPenalty
from stretto.blocks.stack import Stack

Precision = Literal["fp32", "bf16", "fp16"]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: Precision, model: Stack) -> Precision:
    """Return `precision`, or raise if it is not supported, or not for this model."""
    if precision not in ("fp32", *_DTYPES):
        raise ConfigError(f"precision={precision!r} is not supported; use fp32, bf16 or fp16")
    if precision == "fp16" and any(isinstance(module, ActivationPenalty) for module in model.modules()):
        # The penalty's gradient does not depend on that of the loss, and so not on its scale.
        raise ConfigError(
            "precision='fp16' scales the loss, but not an ActivationPenalty; use bf16, or remove the block"
        )
    return precision


def compute_dtype(precision: Precision) -> torch.dtype | None:
    """Return the dtype that blocks compute in; None for that of the model's weights."""
    return _DTYPES.get(precision)


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Return the context in which blocks compute in `precision`; fp32 means the dtype of the model's weights."""
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, _DTYPES[precision])
