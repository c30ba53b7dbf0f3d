"""flatten_bf16: puts the bf16 weights of an RNN module into one buffer, in the order that cuDNN requires.

torch's `RNNBase.flatten_parameters` does this for fp16, fp32 and fp64. It leaves out bf16, which cuDNN's RNNs support
since version 9.13; without the buffer, torch would copy all weights at every call, and warn.
"""

import torch
from torch import nn
from torch.backends.cudnn.rnn import get_cudnn_mode

_CUDNN_WITH_BF16 = 91300


def flatten_bf16(rnn: nn.RNNBase) -> None:
    """Move the weights of `rnn` into one buffer, if they are in bf16 on a GPU whose cuDNN supports it."""
    weights = [weight for weight in rnn._flat_weights if weight is not None]
    first, version = weights[0], torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if not first.is_cuda or first.dtype != torch.bfloat16 or (version or 0) < _CUDNN_WITH_BF16:
        return
    num_weights = (4 if rnn.bias else 2) + (rnn.proj_size > 0)
    mode = get_cudnn_mode(rnn.mode)  # type: ignore[no-untyped-call]
    with torch.no_grad(), torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
        torch._cudnn_rnn_flatten_weight(
            weights, num_weights, rnn.input_size, mode, rnn.hidden_size, rnn.proj_size,
            rnn.num_layers, rnn.batch_first, rnn.bidirectional,
        )  # fmt: skip
