"""Edge: what one step of one row looks like where two stages meet."""

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.base.window import Rows, Window
from stretto.blocks.stack import Stack
from stretto.engine.engine import payload
from stretto.mesh.mesh import Mesh

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
_SIZE = 8


@dataclass(frozen=True)
class Edge:
    """Features and dtype of what passes; steps and rows differ from message to message."""

    features: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, y: Tensor) -> "Edge":
        """Return the edge that a stage's output passes."""
        return cls(tuple(y.shape[2:]), y.dtype)

    def blank(self, shape: tuple[int, int], device: torch.device) -> Tensor:
        """Return a buffer for some steps and rows."""
        return torch.empty(*shape, *self.features, dtype=self.dtype, device=device)

    def pack(self, device: torch.device) -> Tensor:
        """Return the edge as a few numbers, to tell the next stage."""
        numbers = [_DTYPES.index(self.dtype), len(self.features), *self.features]
        return torch.tensor(numbers + [0] * (_SIZE - len(numbers)), device=device)

    @classmethod
    def unpack(cls, numbers: Tensor) -> "Edge":
        """Return the edge that `pack` told of."""
        dtype, dims, *features = numbers.tolist()
        return cls(tuple(features[:dims]), _DTYPES[dtype])


def learn_edges(stack: Stack, mesh: Mesh, window: Window) -> tuple[Edge | None, Edge | None]:
    """Send one step of one row up the stages, once; return the edges below and above this stage."""
    device = mesh.world.device
    below: Edge | None = None
    if mesh.is_first_stage:
        x = payload(window, "inputs", stack.dtype)[:1, :1].to(device)
    else:
        assert mesh.upward is not None
        mesh.upward.expect(iter([torch.empty(_SIZE, dtype=torch.int64, device=device)]))
        below = Edge.unpack(mesh.upward.take("the first message"))
        x = torch.zeros_like(below.blank((1, 1), device))
    y, _ = stack(x, stack.begin(Rows.of(1, 1, device=device, dtype=stack.dtype)))
    if mesh.is_last_stage:
        return below, None
    assert mesh.upward is not None
    above = Edge.of(y)
    mesh.upward.send(above.pack(device))
    mesh.upward.flush()
    return below, above
