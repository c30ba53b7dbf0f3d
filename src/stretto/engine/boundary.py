"""Edge: what one step of one row looks like where two stages meet."""

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.base.window import Rows, Window
from stretto.blocks.stack import Stack
from stretto.engine.engine import window_tensor
from stretto.mesh.mesh import Mesh

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
_SIZE = 8


@dataclass(frozen=True)
class BoundarySpec:
    """Features and dtype of what passes; steps and rows differ from message to message."""

    features: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, y: Tensor) -> "BoundarySpec":
        """Return the edge that a stage's output passes."""
        return cls(tuple(y.shape[2:]), y.dtype)

    def empty(self, shape: tuple[int, int], device: torch.device) -> Tensor:
        """Return a buffer for some steps and rows."""
        return torch.empty(*shape, *self.features, dtype=self.dtype, device=device)

    def pack(self, device: torch.device) -> Tensor:
        """Return the edge as a few numbers, to tell the next stage."""
        numbers = [_DTYPES.index(self.dtype), len(self.features), *self.features]
        return torch.tensor(numbers + [0] * (_SIZE - len(numbers)), device=device)

    @classmethod
    def unpack(cls, numbers: Tensor) -> "BoundarySpec":
        """Return the edge that `pack` told of."""
        dtype, dims, *features = numbers.tolist()
        return cls(tuple(features[:dims]), _DTYPES[dtype])


def infer_boundaries(stack: Stack, mesh: Mesh, window: Window) -> tuple[BoundarySpec | None, BoundarySpec | None]:
    """Send one step of one row up the stages, once; return the edges below and above this stage."""
    device = mesh.world.device
    below: BoundarySpec | None = None
    if mesh.is_first_stage:
        x = window_tensor(window, "inputs", stack.dtype)[:1, :1].to(device)
    else:
        assert mesh.forward_channel is not None
        mesh.forward_channel.post_receives(iter([torch.empty(_SIZE, dtype=torch.int64, device=device)]))
        below = BoundarySpec.unpack(mesh.forward_channel.receive("the first message"))
        x = torch.zeros_like(below.empty((1, 1), device))
    y, _ = stack(x, stack.begin(Rows.of(1, 1, device=device, dtype=stack.dtype)))
    if mesh.is_last_stage:
        return below, None
    assert mesh.forward_channel is not None
    above = BoundarySpec.of(y)
    mesh.forward_channel.send(above.pack(device))
    mesh.forward_channel.flush()
    return below, above
