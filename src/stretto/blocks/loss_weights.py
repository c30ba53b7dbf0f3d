"""attach_loss: makes the weights of a loss part of a model, so that they are trained and saved like a block's."""

from torch import nn

from stretto.blocks.losses import Loss
from stretto.blocks.stack import Stack
from stretto.blocks.torch_losses import loss_module


def attach_loss(stack: Stack, loss: Loss | nn.Module) -> Stack:
    """Return the stack with a loss that has weights or buffers as its child `loss`; else the stack itself.

    The names of these weights begin with `loss.`, whatever the number of blocks and stages. The result shares its
    blocks with `stack`. The loss's weights get the dtype of the stack's.
    """
    module = loss_module(loss)
    if module is None or stack.loss is module or not module.state_dict():
        return stack
    return Stack(stack, stack.first, module.to(stack.dtype))
