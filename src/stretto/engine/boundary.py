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


def infer_boundaries(
    stack: Stack, mesh: Mesh, inputs: Tensor | None
) -> tuple[BoundarySpec | None, BoundarySpec | None]:
    """Run this stage on one time step of one row; return the specs of its input and output.

    A stage sends only the spec of its output to the next one, so all stages but the first run on zeros. The first stage
    receives no activations and the last stage sends none; the spec is then None.
    """
    device = mesh.world.device
    input_spec: BoundarySpec | None = None
    if inputs is not None:  # the first stage
        x = inputs[:1, :1]
    else:
        assert mesh.forward_channel is not None
        mesh.forward_channel.post_receives(iter([torch.empty(_PACKED_SIZE, dtype=torch.int64, device=device)]))
        input_spec = BoundarySpec.unpack(mesh.forward_channel.receive("the shape of the activations"))
        x = torch.zeros_like(input_spec.empty((1, 1), device))
    y, _ = stack(x, stack.begin(Rows.of(num_rows=1, num_steps=1, device=device, dtype=stack.dtype)))
    if mesh.is_last_stage:
        return input_spec, None
    assert mesh.forward_channel is not None
    output_spec = BoundarySpec(tuple(y.shape[2:]), y.dtype)
    mesh.forward_channel.send(output_spec.pack(device))
    mesh.forward_channel.flush()
    return input_spec, output_spec
