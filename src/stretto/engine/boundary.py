"""BoundarySpec: the features and dtype of the activations between two stages."""

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.base.window import Rows
from stretto.blocks.stack import Stack
from stretto.mesh.mesh import Mesh

# A dtype is sent as its index in this tuple.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
_PACKED_SIZE = 8  # the dtype's index, the number of feature dims, and up to 6 dims


@dataclass(frozen=True)
class BoundarySpec:
    """The feature dims and dtype of activations `[time, batch, *features]` and their gradients; time and batch vary."""

    features: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, shape: tuple[int, int], device: torch.device) -> Tensor:
        """Return an uninitialized tensor; `shape` is `(time, batch)`."""
        return torch.empty(*shape, *self.features, dtype=self.dtype, device=device)

    def pack(self, device: torch.device) -> Tensor:
        """Return the spec as a tensor of fixed size, to send to the next stage."""
        numbers = [_DTYPES.index(self.dtype), len(self.features), *self.features]
        return torch.tensor(numbers + [0] * (_PACKED_SIZE - len(numbers)), device=device)

    @classmethod
    def unpack(cls, numbers: Tensor) -> "BoundarySpec":
        """Return the spec from the tensor that `pack` returned."""
        dtype_index, num_dims, *features = numbers.tolist()
        return cls(tuple(features[:num_dims]), _DTYPES[dtype_index])


Boundary = tuple[BoundarySpec | None, BoundarySpec | None]
"""The specs of a run's input and output; None for the inputs of the first run and the outputs of the last."""


def infer_boundary(
    stack: Stack, mesh: Mesh, inputs: Tensor | BoundarySpec | None, *, is_last: bool, sends: bool
) -> Boundary:
    """Run a run of blocks on one time step of one row; return the specs of its input and output.

    `inputs` are those of the model's first run; for a run that follows another one on this stage, the spec of what that
    one outputs; None if they come from another stage. A stage sends only this spec to the next one (with `sends`), so
    all runs but the first use zeros.
    """
    device = mesh.world.device
    input_spec: BoundarySpec | None = None
    if isinstance(inputs, Tensor):
        x = inputs[:1, :1]
    else:
        if inputs is None:
            assert mesh.forward_channel is not None
            mesh.forward_channel.post_receives(iter([torch.empty(_PACKED_SIZE, dtype=torch.int64, device=device)]))
            inputs = BoundarySpec.unpack(mesh.forward_channel.receive("the shape of the activations"))
        input_spec = inputs
        x = torch.zeros_like(input_spec.empty((1, 1), device))
    y, _ = stack(x, stack.begin(Rows.of(num_rows=1, num_steps=1, device=device, dtype=stack.dtype)))
    if is_last:
        return input_spec, None
    output_spec = BoundarySpec(tuple(y.shape[2:]), y.dtype)
    if sends:
        assert mesh.forward_channel is not None
        mesh.forward_channel.send(output_spec.pack(device))
        mesh.forward_channel.flush()
    return input_spec, output_spec
