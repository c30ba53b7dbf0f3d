"""CutGraph: a part of a step with an autograd graph of its own, so that its backward can run at any later time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class CutGraph:
    """Runs a function of some tensors; later its backward, from the gradients of its outputs to those of its inputs.

    Inputs without a graph become new leaves; one that has a graph keeps it. `outputs` are without it, but still say
    whether they need a gradient. With `recompute`, the function runs without a graph first, and again in the backward.
    """

    def __init__(
        self,
        function: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        inputs: Sequence[Tensor],
        *,
        has_backward: bool,
        recompute: bool = False,
    ) -> None:
        self._function = function
        self.inputs = [make_leaf(tensor, tensor.requires_grad) if tensor.is_leaf else tensor for tensor in inputs]
        with torch.set_grad_enabled(has_backward and not recompute):
            outputs = function(self.inputs)
        is_unknown = has_backward and recompute
        self.outputs = [
            make_leaf(tensor, tensor.is_floating_point() if is_unknown else tensor.requires_grad) for tensor in outputs
        ]
        self._outputs = None if recompute or not has_backward else outputs

    def release(self) -> None:
        """Forget all tensors: no backward follows."""
        self.inputs, self.outputs = [], []

    def backward(
        self, gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return the gradients of the inputs and of the parameters; None for those that have none. Frees the graph."""
        outputs, self._outputs = self._outputs, None
        if outputs is None:
            with torch.enable_grad():
                outputs = self._function(self.inputs)
        leaf_gradients = find_gradients(outputs, gradients, [*self.inputs, *parameters])
        return leaf_gradients[: len(self.inputs)], leaf_gradients[len(self.inputs) :]


def find_gradients(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], leaves: Sequence[Tensor], *, keep_graph: bool = False
) -> list[Tensor | None]:
    """Return the gradients of some tensors from those of `outputs`; None for one that is not a leaf or has none."""
    roots, root_gradients = [], []
    for output, gradient in zip(outputs, gradients, strict=True):
        if gradient is not None and output.requires_grad:
            roots.append(output)
            root_gradients.append(gradient.to(output.dtype))
    trained = [tensor for tensor in leaves if tensor.is_leaf and tensor.requires_grad]
    if not roots or not trained:
        return [None] * len(leaves)
    trained_gradients = iter(
        torch.autograd.grad(roots, trained, root_gradients, allow_unused=True, retain_graph=keep_graph)
    )
    return [next(trained_gradients) if tensor.is_leaf and tensor.requires_grad else None for tensor in leaves]


def make_leaf(tensor: Tensor, needs_gradient: bool) -> Tensor:
    """Return a tensor without its graph, which still says whether it needs a gradient."""
    return tensor.detach().requires_grad_(needs_gradient)
