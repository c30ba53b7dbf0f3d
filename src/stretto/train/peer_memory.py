"""PeerMemory: a trainer's tensors in the memory of the ranks that were in the last round, for those of the next one.

Ranks that hold the same blocks have the same weights and optimizer state. A rank that has them keeps its own; one that
is new gets them from the others. Lanes are divided anew: each rank says which it has, and gets the ones it needs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import safetensors.torch
import torch
from torch import Tensor

from stretto.base.errors import StateLostError
from stretto.checkpoint.manifest import TrainingState
from stretto.checkpoint.restore import RankTensors, TensorInfo, broadcast_bucket, make_buckets
from stretto.checkpoint.shards import TensorShard
from stretto.mesh.mesh import Mesh
from stretto.mesh.world import World
from stretto.train.lane_copy import unpack_rows


@dataclass(frozen=True)
class LaneRows:
    """The states of some lanes, as `pack_rows` returns them."""

    lanes: range
    rows: Tensor


@dataclass(frozen=True)
class TrainerMemory:
    """What a rank takes from a trainer in one round to that in the next."""

    training_state: TrainingState
    tensors: Mapping[str, Tensor]  # weights, averages and the optimizer's state, named as in a checkpoint
    full_shapes: Mapping[str, tuple[int, ...]]  # where stages split the rows of a tensor, that of all rows
    lanes: LaneRows | None = None  # this rank's own
    lane_copy: LaneRows | None = None  # those of another replica, in case it is lost

    def describe(self) -> str:
        """Return what a rank without memory must know, as text."""
        infos = {name: [str(tensor.dtype)[6:], self.full_shapes[name]] for name, tensor in self.tensors.items()}
        return json.dumps([infos, self.lanes is not None])

    def dump(self) -> Tensor:
        """Return a copy of it as bytes in CPU memory, without the lanes of another replica."""
        lanes = None if self.lanes is None else [self.lanes.lanes.start, self.lanes.lanes.stop]
        text = json.dumps([self.training_state.model_dump(mode="json"), self.full_shapes, lanes])
        tensors = {f"tensors.{name}": tensor.cpu().contiguous() for name, tensor in self.tensors.items()}
        tensors["text"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        if self.lanes is not None:
            tensors["lanes"] = self.lanes.rows.cpu()
        return torch.frombuffer(bytearray(safetensors.torch.save(tensors)), dtype=torch.uint8)

    @staticmethod
    def load(content: Tensor) -> "TrainerMemory":
        """Return what `dump` was called with; the tensors are on the CPU."""
        tensors = safetensors.torch.load(content.numpy().tobytes())
        state, full_shapes, lanes = json.loads(tensors.pop("text").numpy().tobytes())
        rows = tensors.pop("lanes", None)
        return TrainerMemory(
            TrainingState.model_validate_json(json.dumps(state)),
            {name.removeprefix("tensors."): tensor for name, tensor in tensors.items()},
            {name: tuple(shape) for name, shape in full_shapes.items()},
            None if rows is None else LaneRows(range(*lanes), rows),
        )


@dataclass(frozen=True)
class _Info:
    dtype: str
    full_shape: tuple[int, ...]


@dataclass(frozen=True)
class PeerMemory:
    """The memory of the ranks `holders`; `memory` is this rank's own, None if it is new."""

    memory: TrainerMemory | None
    holders: Sequence[int]
    training_state: TrainingState
    infos: Mapping[str, TensorInfo] = field(default_factory=dict)
    location: str = "the memory of other ranks"

    @staticmethod
    def find(mesh: Mesh, memory: TrainerMemory | None, holders: Sequence[int]) -> "PeerMemory":
        """Return what the ranks of a mesh have; they all call this. Each stage has at least one of the holders."""
        copies, own_index = mesh.copies_of(holders), mesh.copy_index
        # All ranks take the training state of one: they may have lost a peer before or after they recorded a score.
        state = mesh.world.broadcast_text("" if memory is None else memory.training_state.model_dump_json(), holders[0])
        text = "" if memory is None else memory.describe()
        infos, has_lanes = json.loads(_broadcast_text(mesh, text if own_index == copies[0] else "", copies[0]))
        named = {name: _Info(dtype, tuple(shape)) for name, (dtype, shape) in infos.items()}
        if has_lanes:
            named["lanes."] = _Info("uint8", ())
        return PeerMemory(memory, holders, TrainingState.model_validate_json(state), named)

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.infos

    def check_same(self, world: World) -> None:
        """Do nothing: there is only one."""

    def take(self, name: str) -> Tensor | None:
        return None if self.memory is None else self.memory.tensors[name]

    def fill(self, mesh: Mesh, tensors: RankTensors) -> None:
        shards = [*tensors.shared, *(shard for shard, _ in tensors.tied)]
        if self.memory is not None:
            for shard in shards:
                shard.tensor.detach().copy_(self.memory.tensors[shard.name])
        readers = mesh.copies_of(self.holders)
        if len(readers) < mesh.num_copies:
            for index, bucket in enumerate(make_buckets(shard.tensor.detach() for shard in shards)):
                broadcast_bucket(mesh, bucket, readers[index % len(readers)])
        if tensors.own:
            self._fill_lanes(mesh, tensors.own)

    def _fill_lanes(self, mesh: Mesh, shards: Sequence[TensorShard]) -> None:
        """Fill the states of this rank's lanes: each rank puts the rows that it has into a table of all lanes.

        Elsewhere, it has zeros. Two ranks may have the same rows, so the table with all rows is the maximum.
        """
        num_lanes, own = shards[0].full_shape[0], shards[0].rows
        num_bytes = sum(shard.tensor.nbytes for shard in shards) // len(own)
        table = torch.zeros(num_lanes, num_bytes + 1, dtype=torch.uint8, device=shards[0].tensor.device)
        memory = self.memory
        for part in () if memory is None else (memory.lanes, memory.lane_copy):
            if part is None:
                continue
            table[part.lanes.start : part.lanes.stop, :-1] = part.rows
            table[part.lanes.start : part.lanes.stop, -1] = 1
        mesh.max_over_copies(table)
        if not table[:, -1].all():
            lane = int((table[:, -1] == 0).nonzero()[0])
            raise StateLostError(f"the ranks that had the state of lane {lane} are lost; start again to resume")
        unpack_rows(table[own.start : own.stop, :-1], [shard.tensor for shard in shards])


def _broadcast_text(mesh: Mesh, text: str, source: int) -> str:
    """Return the text of number `source` among the ranks that hold this rank's blocks."""
    if mesh.num_copies == 1:
        return text
    content = torch.tensor(list(text.encode()), dtype=torch.uint8)
    length = torch.tensor([len(content)], device=mesh.world.device)
    mesh.broadcast_to_copies(length, source)
    buffer = content if len(content) else torch.zeros(int(length), dtype=torch.uint8)
    buffer = buffer.to(mesh.world.device)
    mesh.broadcast_to_copies(buffer, source)
    return buffer.cpu().numpy().tobytes().decode()
