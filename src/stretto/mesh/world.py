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
from stretto.mesh.device import find_device
from stretto.mesh.heartbeat import Heartbeat
from stretto.mesh.launch_info import LaunchInfo, find_launch_info
from stretto.mesh.liveness import LivenessCheck
from stretto.mesh.mailbox import LocalMailbox, Mailbox, StoreMailbox
from stretto.mesh.rendezvous import leave, rendezvous
from stretto.mesh.store import open_store

TIMEOUT = timedelta(minutes=10)
_SINGLE_RANK = LaunchInfo(0, 1, 0, 1, "127.0.0.1", 0)
# The errors of what was asked for, not of a rank: all ranks end with them.
SHARED_ERRORS: tuple[type[StrettoError], ...] = (ConfigError, DataError, DivergedError, FencedError, PlanError)


@dataclass(frozen=True)
class World:
    """This rank among all ranks of the job."""

    rank: int
    size: int
    device: torch.device
    liveness: LivenessCheck | None = None  # none when alone
    mailbox: Mailbox = field(default_factory=LocalMailbox)
    heartbeat: Heartbeat | None = None  # none when alone
    timeout: timedelta = TIMEOUT
    local_size: int = 1  # ranks on this machine

    @property
    def is_single_rank(self) -> bool:
        """Is this the only rank?"""
        return self.size == 1

    @property
    def is_rank_zero(self) -> bool:
        """Is this rank 0, which writes what only one may write?"""
        return self.rank == 0

    def find_lost_rank(self, ranks: Sequence[int]) -> int | None:
        """Return one of `ranks` that is gone, or another that someone found gone; none if nobody can say."""
        return None if self.liveness is None else self.liveness.find_lost_rank(ranks)

    def set_status(self, status: object) -> None:
        """Say what this rank is doing, should others ever have to ask."""
        if self.heartbeat is not None:
            self.heartbeat.status = status

    def last_status(self, rank: int) -> str | None:
        """Return what a rank said last that it was doing."""
        return None if self.liveness is None else self.liveness.last_status(rank)

    def raise_peer_error(self) -> None:
        """Raise the error that another rank has told of, if one has."""
        told = self.peer_error()
        if told is not None:
            raise told

    def publish_error(self, error: StrettoError, print_error: Callable[[], None] = lambda: None) -> None:
        """Leave word of the error that ends this rank, so that all others end with it too.

        `print_error` is called on one rank only: the first to tell. The same mistake is then said once, not on every rank.
        """
        if self.liveness is None:
            print_error()
            return
        kind = next((kind for kind in SHARED_ERRORS if isinstance(error, kind)), StrettoError)
        is_own = self.liveness.publish_error(f"{kind.__name__}\n{error}")
        if is_own:
            print_error()
        self.liveness.confirm_error(is_own)

    def peer_error(self) -> StrettoError | None:
        """Return the error that another rank has told of."""
        word = None if self.liveness is None else self.liveness.read_error()
        if word is None:
            return None
        name, sentence = word.split("\n", 1)
        return next((kind for kind in SHARED_ERRORS if kind.__name__ == name), StrettoError)(sentence)


@contextmanager
def world(size: int | None = None, *, device: str = "auto", timeout: timedelta = TIMEOUT) -> Iterator[World]:
    """Join the world that torchrun, srun, mpirun or what reads TF_CONFIG has started, or be alone; leave it at the end.

    `size` is how many ranks the layout needs: another number is an error on every rank, before any of them waits for
    another. A rank that fails leaves at once, its connections close, and those that wait for it fail too.
    """
    launch_info = find_launch_info(os.environ) or _SINGLE_RANK
    if size is not None and size != launch_info.size:
        raise MeshError(
            f"the layout needs {size} ranks, but {launch_info.size} {'was' if launch_info.size == 1 else 'were'} started; "
            f"start {size} ({launch_info.launch_command.format(size)}), change the layout, or let layout.elastic fit it"
        )
    if launch_info.size == 1:
        yield World(0, 1, find_device(device))
        return
    own = find_device(device, launch_info.local_rank, launch_info.local_size, is_bound=launch_info.is_bound)
    joined, store = _join(launch_info, own, timeout)
    assert joined.liveness is not None and joined.heartbeat is not None
    try:
        yield joined
        # Only now: after an error there is no farewell, so that the others see our connections close.
        dist.destroy_process_group()
    except SHARED_ERRORS as error:
        joined.publish_error(error)
        raise
    finally:
        joined.heartbeat.stop()
        joined.liveness.stop()
    if not launch_info.has_agent_store:
        leave(store, launch_info.rank, launch_info.size)


def _join(launch_info: LaunchInfo, device: torch.device, timeout: timedelta) -> tuple[World, Store]:
    gathering = PrefixStore(f"stretto/{launch_info.run_id}", open_store(launch_info, timeout))
    store = PrefixStore(rendezvous(gathering, launch_info.rank, launch_info.size, timeout), gathering)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        timeout=timeout,
        world_size=launch_info.size,
        rank=launch_info.rank,
        store=PrefixStore("groups", store),
        device_id=None if device.type == "cpu" else device,
    )
    liveness = LivenessCheck(store, launch_info.rank, launch_info.size, None if launch_info.has_agent_store else 0)
    heartbeat = Heartbeat(store, launch_info.rank, launch_info.size)
    mailbox = StoreMailbox(store)
    return World(
        launch_info.rank, launch_info.size, device, liveness, mailbox, heartbeat, timeout, launch_info.local_size
    ), store
