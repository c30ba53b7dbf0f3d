"""Puts the weights of an RNN module into one buffer, in the order that cuDNN requires.

Without the buffer, torch would copy all weights at every call, and warn. torch's `RNNBase.flatten_parameters` makes it
for a module's own weights, but not for bf16, which cuDNN's RNNs support since version 9.13.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.backends.cudnn.rnn import get_cudnn_mode

_CUDNN_WITH_BF16 = 91300


def has_bf16() -> bool:
    """Return whether cuDNN's RNNs support bf16."""
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return (version or 0) >= _CUDNN_WITH_BF16


def flatten_bf16(rnn: nn.RNNBase) -> None:
    """Move the weights of `rnn` into one buffer, if they are in bf16 on a GPU whose cuDNN supports it."""
    weights = [weight for weight in rnn._flat_weights if weight is not None]
    if weights[0].is_cuda and weights[0].dtype == torch.bfloat16:
        _flatten(rnn, weights, rnn.input_size, rnn.num_layers, bidirectional=rnn.bidirectional)


def flatten_layer(rnn: nn.RNNBase, input_size: int, weights: Sequence[Tensor]) -> None:
    """Move copies of the weights of one layer of `rnn`, one way, on a GPU, into one buffer."""
    _flatten(rnn, weights, input_size, 1, bidirectional=False)


def _flatten(
    rnn: nn.RNNBase, weights: Sequence[Tensor], input_size: int, num_layers: int, *, bidirectional: bool
) -> None:
    if weights[0].dtype == torch.bfloat16 and not has_bf16():
        return
    num_weights = (4 if rnn.bias else 2) + (rnn.proj_size > 0)
    mode = get_cudnn_mode(rnn.mode)  # type: ignore[no-untyped-call]
    sizes = (rnn.hidden_size, rnn.proj_size, num_layers)
    with torch.no_grad(), torch.cuda.device_of(weights[0]):  # type: ignore[no-untyped-call]
        torch._cudnn_rnn_flatten_weight(
            [*weights], num_weights, input_size, mode, *sizes, rnn.batch_first, bidirectional
        )
