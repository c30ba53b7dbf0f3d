"""TensorShard: a rank's rows of a tensor, and how ranks that hold the same tensors split them to save each once.

weights.a   weights.b   weights.c        what two replicas hold, as one line of bytes
|-------- replica 0 -----|---- replica 1 ----|       what each of them writes: tensors are cut between rows
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stretto.checkpoint.even_split import EvenSplit
from stretto.checkpoint.manifest import MAX_DIGEST_BYTES, SavedShard, SavedTensor


@dataclass(frozen=True)
class TensorShard:
    """This rank's rows of a tensor; a tensor that isn't split is one shard."""

    name: str
    tensor: Tensor
    first: int = 0  # index of the shard's first row in the full tensor
    full_rows: int | None = None  # of the full tensor; None if this is all of it
    digest_bytes: int = MAX_DIGEST_BYTES  # that one digest covers when it is saved; fewer if each rank reads some rows

    @property
    def rows(self) -> range:
        """The rows of the full tensor that this shard holds; a scalar counts as one row."""
        return range(self.first, self.first + (len(self.tensor) if self.tensor.dim() else 1))

    @property
    def full_shape(self) -> torch.Size:
        """The shape of the full tensor."""
        shape = self.tensor.shape
        return shape if self.full_rows is None else torch.Size([self.full_rows, *shape[1:]])

    @property
    def dtype(self) -> str:
        """The name of its dtype, such as `float32`."""
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def rows_per_digest(self) -> int:
        """How many rows one digest covers when it is saved."""
        return max(1, self.digest_bytes * len(self.rows) // self.tensor.nbytes)

    def part(self, rows: range) -> Tensor:
        """Return some of its rows, which are numbered as in the full tensor; a view."""
        tensor = self.tensor.detach()
        return tensor[rows.start - self.first : rows.stop - self.first] if tensor.dim() else tensor

    def cut(self, rows: range) -> "TensorShard":
        """Return the shard of some of its rows."""
        if rows == self.rows:
            return self
        return replace(self, tensor=self.part(rows), first=rows.start, full_rows=self.full_shape[0])

    def saved(self) -> SavedShard:
        """Return what a manifest says of the shard."""
        tensor = SavedTensor(name=self.name, dtype=self.dtype, full_shape=tuple(self.full_shape))
        return SavedShard(tensor, self.rows, self.rows_per_digest)


def own_share(shards: Iterable[TensorShard], index: int, count: int) -> list[TensorShard]:
    """Return what rank `index` of `count` saves of shards that all of them hold: an equal share of the bytes."""
    nonempty = [shard for shard in shards if shard.tensor.numel()]
    share = EvenSplit(sum(shard.tensor.nbytes for shard in nonempty), count).share(index)
    own, offset = [], 0
    for shard in nonempty:
        num_rows, stop = len(shard.rows), offset + shard.tensor.nbytes
        row_bytes = shard.tensor.nbytes // num_rows
        # A row belongs to the share in which it starts.
        first, last = (min(max(-(-(end - offset) // row_bytes), 0), num_rows) for end in (share.start, share.stop))
        if first < last:
            own.append(shard.cut(range(shard.first + first, shard.first + last)))
        offset = stop
    return own
