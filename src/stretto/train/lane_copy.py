"""LaneCopy: each replica keeps the hidden states of another replica's lanes, so that they outlive that replica.

    replica 0            replica 1            replica 2
    lanes 0 to 3   ───►  lanes 4 to 7   ───►  lanes 8 to 11   ───►  replica 0
                         copy of 0 to 3       copy of 4 to 7

The states after a step are sent as soon as they are known. A rank adds its part to the step's totals only when it has
its copy. So if the totals are complete on any rank, all copies have arrived, and the step counts. If they are complete
on none, all ranks still have the states before the step.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stretto.base.state import State
from stretto.mesh.mesh import Mesh


class LaneCopy:
    """The states of the previous replica's lanes, which are `lanes`."""

    def __init__(self, mesh: Mesh, lanes: range) -> None:
        self.lanes = lanes
        self.rows: Tensor | None = None  # after the last step that counts, as `pack_rows` returns them
        self._mesh: Mesh | None = mesh
        self._incoming: Tensor | None = None
        self._outgoing: Tensor | None = None
        self._wait: Callable[[], None] | None = None

    def start(self, state: State) -> None:
        """Start to send this replica's states, and to receive those of the previous one; a stage may have none."""
        if not state:
            return
        assert self._mesh is not None, "not after disconnect()"
        self._outgoing = pack_rows(state)
        self._incoming = self._outgoing.new_empty(len(self.lanes), self._outgoing.shape[1])
        self._wait = self._mesh.start_ring_exchange(self._outgoing, self._incoming)

    def wait(self) -> None:
        """Wait until both are done."""
        if self._wait is not None:
            self._wait()

    def finish(self, *, is_accepted: bool = True) -> None:
        """Keep what was received, because the step counts; or else what was there before, if all ranks do that."""
        self.rows = self._incoming if is_accepted else self.rows
        self._incoming = self._outgoing = self._wait = None

    def disconnect(self) -> None:
        """Drop the connection to other ranks."""
        self._mesh = self._wait = None


def pack_rows(state: State) -> Tensor:
    """Return a state as bytes: `[rows, bytes of a row]`."""
    rows = [tensor.detach().contiguous().reshape(len(tensor), -1) for tensor in state]
    return torch.cat([row.view(torch.uint8) for row in rows], dim=1)


def unpack_rows(rows: Tensor, into: Sequence[Tensor]) -> None:
    """Copy what `pack_rows` returned into tensors of the same shapes and dtypes."""
    parts = torch.split(rows, [tensor.nbytes // len(tensor) for tensor in into], dim=1)
    for part, tensor in zip(parts, into, strict=True):
        tensor.copy_(part.clone(memory_format=torch.contiguous_format).view(tensor.dtype).view(tensor.shape))
