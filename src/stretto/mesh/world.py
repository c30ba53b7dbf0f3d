"""World: the ranks of a job, as their launcher has placed them; alone where there is none."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from stretto.base.errors import (
    ConfigError,
    DataError,
    DivergedError,
    FencedError,
    MeshError,
    PlanError,
    StrettoError,
)
from stretto.mesh.board import Board, OwnBoard, SharedBoard
from stretto.mesh.device import find_device
from stretto.mesh.gathering import gather_ranks, part_ranks
from stretto.mesh.place import Place, find_place
from stretto.mesh.pulse import Pulse
from stretto.mesh.rollcall import RollCall
from stretto.mesh.store import open_store

TIMEOUT = timedelta(minutes=10)
_ALONE = Place(0, 1, 0, 1, "127.0.0.1", 0)
# The errors of what was asked for, not of a rank: all ranks end with them.
TOLD: tuple[type[StrettoError], ...] = (ConfigError, DataError, DivergedError, FencedError, PlanError)


@dataclass(frozen=True)
class World:
    """This rank among all ranks of the job."""

    rank: int
    size: int
    device: torch.device
    roll_call: RollCall | None = None  # none when alone
    board: Board = field(default_factory=OwnBoard)
    pulse: Pulse | None = None  # none when alone
    timeout: timedelta = TIMEOUT
    local_size: int = 1  # ranks on this machine

    @property
    def is_alone(self) -> bool:
        """Is this the only rank?"""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Is this rank 0, which writes what only one may write?"""
        return self.rank == 0

    def find_lost(self, ranks: Sequence[int]) -> int | None:
        """Return one of `ranks` that is gone, or another that someone found gone; none if nobody can say."""
        return None if self.roll_call is None else self.roll_call.find_lost(ranks)

    def note(self, doing: object) -> None:
        """Say what this rank is doing, should others ever have to ask."""
        if self.pulse is not None:
            self.pulse.doing = doing

    def last_sign(self, rank: int) -> str | None:
        """Return what a rank said last that it was doing."""
        return None if self.roll_call is None else self.roll_call.last_sign(rank)

    def check_told(self) -> None:
        """Raise the error that another rank has told of, if one has."""
        told = self.heard()
        if told is not None:
            raise told

    def tell(self, error: StrettoError, say: Callable[[], None] = lambda: None) -> None:
        """Leave word of the error that ends this rank, so that all others end with it too.

        `say` is called on one rank only: the first to tell. The same mistake is then said once, not on every rank.
        """
        if self.roll_call is None:
            say()
            return
        kind = next((kind for kind in TOLD if isinstance(error, kind)), StrettoError)
        is_own = self.roll_call.leave_word(f"{kind.__name__}\n{error}")
        if is_own:
            say()
        self.roll_call.confirm_word(is_own)

    def heard(self) -> StrettoError | None:
        """Return the error that another rank has told of."""
        word = None if self.roll_call is None else self.roll_call.find_word()
        if word is None:
            return None
        name, sentence = word.split("\n", 1)
        return next((kind for kind in TOLD if kind.__name__ == name), StrettoError)(sentence)


@contextmanager
def world(size: int | None = None, *, device: str = "auto", timeout: timedelta = TIMEOUT) -> Iterator[World]:
    """Join the world that torchrun, srun, mpirun or what reads TF_CONFIG has started, or be alone; leave it at the end.

    `size` is how many ranks the layout needs: another number is an error on every rank, before any of them waits for
    another. A rank that fails leaves at once, its connections close, and those that wait for it fail too.
    """
    place = find_place(os.environ) or _ALONE
    if size is not None and size != place.size:
        raise MeshError(
            f"the layout needs {size} ranks, but {place.size} {'was' if place.size == 1 else 'were'} started; "
            f"start {size} ({place.how.format(size)}), change the layout, or let layout.elastic fit it"
        )
    if place.size == 1:
        yield World(0, 1, find_device(device))
        return
    own = find_device(device, place.local_rank, place.local_size, is_bound=place.is_bound)
    joined, store = _join(place, own, timeout)
    assert joined.roll_call is not None and joined.pulse is not None
    try:
        yield joined
        # Only now: after an error there is no farewell, so that the others see our connections close.
        dist.destroy_process_group()
    except TOLD as error:
        joined.tell(error)
        raise
    finally:
        joined.pulse.stop()
        joined.roll_call.stop()
    if not place.has_agent_store:
        part_ranks(store, place.rank, place.size)


def _join(place: Place, device: torch.device, timeout: timedelta) -> tuple[World, Store]:
    gathering = PrefixStore(f"stretto/{place.run}", open_store(place, timeout))
    store = PrefixStore(gather_ranks(gathering, place.rank, place.size, timeout), gathering)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        timeout=timeout,
        world_size=place.size,
        rank=place.rank,
        store=PrefixStore("groups", store),
        device_id=None if device.type == "cpu" else device,
    )
    roll_call = RollCall(store, place.rank, place.size, None if place.has_agent_store else 0)
    pulse = Pulse(store, place.rank, place.size)
    board = SharedBoard(store)
    return World(place.rank, place.size, device, roll_call, board, pulse, timeout, place.local_size), store
