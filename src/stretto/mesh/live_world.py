"""LiveWorld: the ranks of a job that continues, in the same processes, when some ranks are lost and others join."""

import gc
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from stretto.base.errors import LostPeerError, MeshError, StrettoError
from stretto.base.reason import short_reason
from stretto.mesh.join import (
    connect_ranks,
    find_rank_device,
    initialize_process_groups,
    open_run_store,
    warn_without_secret,
)
from stretto.mesh.launch_info import LaunchInfo
from stretto.mesh.launcher_watch import find_launcher, watch_launcher
from stretto.mesh.rank_store import RankStore, lost_store_error
from stretto.mesh.round import Round
from stretto.mesh.rounds import LIVE_SCOPE, TOKEN_VARIABLE, MovedError, Rounds, new_token
from stretto.mesh.secret import find_secret
from stretto.mesh.signed_store import SignedStore
from stretto.mesh.store_hosts import HOSTS_VARIABLE, StoreHosts, find_slot
from stretto.mesh.topology import Topology
from stretto.mesh.world import TIMEOUT, World

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.25
# After so many attempts of the same processes to connect, the cause is not that one of them was lost meanwhile.
_MAX_ATTEMPTS = 3


class LiveWorld:
    """This process among those of its job, in one round after another: `world` has the ranks of the present one.

    `topology` is that of all ranks that the launcher has started. A round has complete replicas only.
    """

    def __init__(
        self, topology: Topology, launch_info: LaunchInfo, device: str, timeout: timedelta, secret: bytes | None
    ) -> None:
        if topology.size != launch_info.size:
            raise MeshError(
                f"the layout needs {topology.size} ranks, but the job has {launch_info.size}; start {topology.size}, "
                "or change the layout"
            )
        self.topology = topology
        self.is_cancelled: Callable[[], bool] = lambda: False  # whether this process no longer waits to join
        self._launch_info, self._timeout = launch_info, timeout
        self._token = os.environ.get(TOKEN_VARIABLE) or new_token()
        self._device, self._backend = find_rank_device(launch_info, device)
        hosts = os.environ.get(HOSTS_VARIABLE)
        self._hosts = None if hosts is None else StoreHosts(hosts, topology, launch_info.rank, timeout, secret)
        if self._hosts is None:
            self._use_store(open_run_store(launch_info, timeout, secret).in_scope(LIVE_SCOPE))
        else:
            warn_without_secret(launch_info, secret)
            self._use_store(self._hosts.find())
        self.round: Round | None = None
        self._world: World | None = None
        self._watch: _NewcomerWatch | None = None

    @property
    def world(self) -> World:
        """The ranks of the present round."""
        assert self._world is not None, "regroup() comes first"
        return self._world

    @property
    def grid(self) -> Topology:
        """The replicas and stages of the present round."""
        assert self.round is not None, "regroup() comes first"
        return replace(self.topology, num_replicas=self.round.size // self.topology.num_columns)

    def has_newcomers(self) -> bool:
        """Return whether processes wait to join; on rank 0. They can after `regroup` on all ranks."""
        return self._watch is not None and self._watch.has_found

    def dismiss(self, rank: int) -> None:
        """Let a rank leave when the others regroup after a step, as if it were lost."""
        assert self.round is not None
        self._rounds.dismiss(self.round, rank)

    def is_dismissed(self) -> bool:
        """Return whether this rank leaves when the others regroup."""
        return self.round is not None and self._rounds.is_dismissed(self.round, self._rounds.slot)

    def regroup(self, step: int = -1, text: str = "", *, is_planned: bool = False) -> Round:
        """Leave the present round and return the next, which has new process groups; `world` is then that of it.

        All ranks call this after a `LostPeerError`, or all after the same step (`is_planned`). The caller has dropped
        all that uses the old groups, such as its engine. This rank has finished `step`; `text` is what others need to
        finish it too. A rank that is lost meanwhile leads to another round.
        """
        last, lost = self.round, [] if is_planned else self._lost_tokens()
        members, num_attempts = set[str](), 0
        self._leave(says_goodbye=is_planned)
        while True:
            try:
                self.round = self._rounds.meet(last, step, text, lost)
            except MovedError:
                assert self._hosts is not None
                self._use_store(self._hosts.find())
                continue
            except RuntimeError as error:
                if self._hosts is None:
                    raise lost_store_error() from error
                self._use_store(self._hosts.move())
                continue
            problem = self._try_to_connect(self.round)
            if problem is None:
                if self.world.is_rank_zero:
                    self._watch = _NewcomerWatch(self._rounds, self.round)
                return self.round
            lost = self._lost_tokens()
            self._leave(says_goodbye=False)
            previous, members = members, {member.token for member in self.round.members}
            num_attempts = num_attempts + 1 if members == previous else 1
            if num_attempts == _MAX_ATTEMPTS:
                raise problem
            # Someone who had arrived may be gone.
            _log.warning("%s; trying again", problem)
            own = self.round.members[self.round.slots.index(self._rounds.slot)]
            last = self.round if own.has_state else None

    def close(self, *, says_goodbye: bool) -> None:
        """Leave for good; with a goodbye, because the run has ended."""
        if says_goodbye:
            self.end()
        self._leave(says_goodbye=says_goodbye)

    def end(self) -> None:
        """Tell processes that wait to join, or wait for this rank, that the run has ended."""
        with suppress(RuntimeError):
            self._rounds.end()

    def has_ended(self) -> bool:
        """Return whether another rank has said that the run has ended."""
        with suppress(RuntimeError):  # the store is gone
            return self._rounds.has_ended()
        return False

    def _use_store(self, store: SignedStore) -> None:
        self._store, info = store, self._launch_info
        self._rounds = Rounds(
            RankStore(store.in_scope("rounds").clone()), info.rank, info.size, self._arrange,
            self._timeout.total_seconds(), token=self._token, node=socket.gethostname(),
        )  # fmt: skip
        self._rounds.is_cancelled = lambda: self.is_cancelled()
        if self._hosts is not None:
            # With several stores, two parts of the run could decide without each other.
            self._rounds.needs_majority = True
            self._rounds.has_moved = self._hosts.has_moved
            address = self._hosts.address
            self._launch_info = replace(info, address=address.host, port=address.port)

    def _arrange(self, slots: frozenset[int]) -> list[int]:
        """Return the slots of complete replicas, as the ranks of a grid with fewer of them."""
        columns, full = range(self.topology.num_columns), self.topology
        replicas = [
            replica
            for replica in range(full.num_replicas)
            if all(full.rank(replica, column) in slots for column in columns)
        ]
        grid = replace(full, num_replicas=len(replicas))
        by_rank = {
            grid.rank(index, column): full.rank(replica, column)
            for index, replica in enumerate(replicas)
            for column in columns
        }
        return [by_rank[rank] for rank in range(len(by_rank))]

    def _try_to_connect(self, new: Round) -> StrettoError | None:
        """Connect to the ranks of a round; return why that failed, without what the error refers to."""
        try:
            self._world = self._connect(new)
        except LostPeerError as error:
            return LostPeerError(str(error))
        except RuntimeError as error:
            return MeshError(
                f"this rank can't connect to the others ({short_reason(error)}); check the network, and variables such "
                "as GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
            )
        return None

    def _connect(self, new: Round) -> World:
        slot = self._rounds.slot
        local_slots = new.local_slots(slot)
        launch_info = replace(
            self._launch_info, rank=new.slots.index(slot), size=new.size, local_rank=local_slots.index(slot),
            local_size=len(local_slots),
        )  # fmt: skip
        if new.size == 1:
            return World(0, 1, self._device, timeout=self._timeout)
        store = self._store.in_scope(f"round/{new.number}")
        has_watchdog = self._backend != dist.Backend.GLOO
        self._world = connect_ranks(
            store, launch_info, self._device, self._timeout, has_watchdog=has_watchdog, is_live=True
        )
        initialize_process_groups(self._world, store, self._backend)
        return self._world

    def _lost_tokens(self) -> list[str]:
        """Return the tokens of processes that this rank knows to be lost."""
        liveness = None if self._world is None else self._world.liveness
        failure = None if liveness is None else liveness.failure
        if failure is None or self.round is None or failure.kind == "error" or failure.rank == self.world.rank:
            return []
        return [self.round.members[failure.rank].token]

    def _leave(self, *, says_goodbye: bool) -> None:
        """End the process groups of the present round, and close its connections."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        world, self._world = self._world, None
        if world is None or world.is_single_rank:
            return
        world.stop_watchdog(says_goodbye=says_goodbye)
        assert world.liveness is not None
        world.liveness.stop(says_goodbye=says_goodbye)
        del world
        with suppress(RuntimeError, ValueError):
            if dist.is_initialized():
                dist.destroy_process_group()
        # gloo closes its connections when the last reference is gone; until then, other ranks wait for this one.
        gc.collect()


class _NewcomerWatch:
    """A thread of rank 0 that looks whether processes wait to join, and shows them that the round lives."""

    def __init__(self, rounds: Rounds, current: Round) -> None:
        self.has_found = False
        self._rounds, self._current = rounds, current
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone
            while not self._stopped.wait(_POLL_SECONDS):
                self._rounds.show_life(self._current)
                self.has_found = self.has_found or self._rounds.is_awaited(self._current)


@contextmanager
def live_world(
    topology: Topology,
    *,
    device: str = "auto",
    timeout: timedelta = TIMEOUT,
    secret_folder: Path | str | None = None,
) -> Iterator[LiveWorld]:
    """Join the ranks that a launcher has started, and those that take the place of lost ones; yield them.

    The first `regroup` waits for all of them, or joins a run that is under way.
    """
    launch_info = find_slot(os.environ, topology)
    # Rank 0 would write a new secret there when it is started again, while others still have the old one.
    folder = None if secret_folder is None or HOSTS_VARIABLE in os.environ else Path(secret_folder)
    secret = find_secret(os.environ, folder, launch_info.rank, timeout)
    with watch_launcher(find_launcher(os.environ, launch_info)):
        live = LiveWorld(topology, launch_info, device, timeout, secret)
        says_goodbye = False
        try:
            yield live
            says_goodbye = True
        finally:
            live.close(says_goodbye=says_goodbye)
