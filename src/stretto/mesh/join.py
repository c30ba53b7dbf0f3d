"""world(): join the other ranks that a launcher has started, and leave them at the end."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from stretto.base.errors import SHARED_ERRORS, MeshError, SavedInterrupt, StrettoError
from stretto.base.reason import short_reason
from stretto.base.units import pluralize
from stretto.mesh.c10d import PrefixStore
from stretto.mesh.device import find_device
from stretto.mesh.launch_info import LaunchInfo, find_launch_info
from stretto.mesh.launcher_watch import find_launcher, watch_launcher
from stretto.mesh.liveness import WAITING, Liveness
from stretto.mesh.rank_store import RankStore
from stretto.mesh.ray_train import replace_process_group
from stretto.mesh.rendezvous import delete_keys, leave, rendezvous
from stretto.mesh.secret import SECRET_VARIABLE, find_secret
from stretto.mesh.signed_store import SignedStore
from stretto.mesh.store import open_store
from stretto.mesh.strict import STRICT, register_strict_backend
from stretto.mesh.watchdog import Watchdog
from stretto.mesh.world import TIMEOUT, World, group_timeout

BACKEND_VARIABLE = "STRETTO_BACKEND"
"""Set to `strict`, it makes ranks on the CPU follow NCCL's rules, for tests; empty is like unset."""

_log = logging.getLogger(__name__)
_SINGLE_RANK = LaunchInfo(rank=0, size=1, local_rank=0, local_size=1, address="127.0.0.1", port=0)


@contextmanager
def world(
    size: int | None = None,
    *,
    device: str = "auto",
    timeout: timedelta = TIMEOUT,
    secret_folder: Path | str | None = None,
) -> Iterator[World]:
    """Join the ranks started by torchrun, Ray Train, srun, mpirun or with TF_CONFIG; yield this rank's world.

    Without a launcher, the world has one rank. This rank leaves when the context ends. `size` is the number of ranks
    the layout needs; if the job has a different number, every rank raises an error before it waits for the others. A
    rank that fails does not wait for others to finish; when it exits, those that wait for it fail. If torchrun is
    killed within the context, its ranks end with a message and exit code 75.

    Ranks sign the messages that they leave for each other with the secret in `STRETTO_SECRET`. If that is not set, rank
    0 creates a secret in `secret_folder`, a folder that all nodes share. With neither, rank 0 logs a warning.
    """
    launch_info = find_launch_info(os.environ)
    launcher = find_launcher(os.environ, launch_info)
    launch_info = launch_info or _SINGLE_RANK
    if size is not None and size != launch_info.size:
        raise MeshError(
            f"the layout needs {pluralize(size, 'rank')}, but the job has {launch_info.size}; "
            f"start {size} ({launch_info.launch_command.format(size)}), change the layout, or set layout.elastic"
        )
    if launch_info.size == 1:
        with watch_launcher(launcher):
            yield World(rank=0, size=1, device=find_device(device), launcher=launcher)
        return
    folder = None if secret_folder is None else Path(secret_folder)
    with watch_launcher(launcher), _join_ranks(launch_info, device, timeout, folder) as joined:
        yield joined


@contextmanager
def _join_ranks(
    launch_info: LaunchInfo, device: str, timeout: timedelta, secret_folder: Path | None
) -> Iterator[World]:
    """Join several ranks; leave them when the context ends."""
    rank_device, backend = _find_rank_device(launch_info, device)
    if launch_info.has_process_group:
        launch_info = replace_process_group(launch_info, rank_device)
    run_store = _open_run_store(launch_info, timeout, find_secret(os.environ, secret_folder, launch_info.rank, timeout))
    launch_id = rendezvous(run_store, launch_info.rank, launch_info.size, timeout)
    store = run_store.in_scope(launch_id)
    joined = _connect_ranks(store, launch_info, rank_device, timeout, has_watchdog=backend != dist.Backend.GLOO)
    assert joined.liveness is not None
    says_goodbye = False
    try:
        _initialize_process_groups(joined, store, backend)
        delete_keys(run_store, launch_info.rank, launch_id)
        joined.liveness.tree.delete_keys()
        yield joined
        # Skipped after an error: a failed rank doesn't wait; the others notice when its connections close at exit.
        dist.destroy_process_group()
        says_goodbye = True
    except SHARED_ERRORS as error:
        joined.publish_error(error)
        raise
    except StrettoError as error:
        says_goodbye = error.ends_all_ranks
        raise
    except SavedInterrupt:
        says_goodbye = True
        raise
    except SystemExit as error:
        says_goodbye = not error.code
        raise
    finally:
        joined.stop_watchdog(says_goodbye=says_goodbye)
        joined.liveness.stop(says_goodbye=says_goodbye)
    if not launch_info.has_agent_store:
        leave(store.unsigned, launch_info.rank, launch_info.size)


def check_backend_variable() -> None:
    """Raise if `STRETTO_BACKEND` has an unknown value; a launcher calls this, so that not every rank reports it."""
    backend = os.environ.get(BACKEND_VARIABLE)
    if backend and backend != STRICT:
        raise MeshError(f"{BACKEND_VARIABLE}={backend!r} is unknown; use strict (CPU only), or leave it unset")


def _find_backend(device: torch.device) -> str:
    """Return the backend for a device; `STRETTO_BACKEND=strict` replaces gloo with a model of NCCL's rules."""
    check_backend_variable()
    if not os.environ.get(BACKEND_VARIABLE):
        return dist.get_default_backend_for_device(device)
    if device.type != "cpu":
        raise MeshError(f"{BACKEND_VARIABLE}='{STRICT}' can't be used on {device.type}; leave it unset, or use the CPU")
    register_strict_backend()
    return STRICT


def _find_rank_device(launch_info: LaunchInfo, device: str) -> tuple[torch.device, str]:
    """Return the device of a rank, which was used once, and the backend for it."""
    local_rank, local_size = launch_info.local_rank, launch_info.local_size
    rank_device = find_device(device, local_rank, local_size, has_own_devices=launch_info.has_own_devices)
    _touch(rank_device)
    return rank_device, _find_backend(rank_device)


def _open_run_store(launch_info: LaunchInfo, timeout: timedelta, secret: bytes | None) -> SignedStore:
    """Return the store of this run, which may hold keys of earlier launches."""
    if secret is None and launch_info.rank == 0:
        _log.warning(
            "the ranks have no secret to sign their messages with, so whoever can connect to %s port %d can end this "
            "run; set %s to the same random text on all nodes",
            launch_info.address, launch_info.port, SECRET_VARIABLE,
        )  # fmt: skip
    torch_store = open_store(launch_info, timeout)
    if launch_info.rank == 0:
        # Under torchrun the store outlives a restart. NCCL leaves this key after an error, and would end the next run.
        torch_store.delete_key("exception_dump")
    return SignedStore(torch_store, secret).in_scope(f"stretto/{launch_info.run_id}")


def _connect_ranks(
    store: SignedStore, launch_info: LaunchInfo, device: torch.device, timeout: timedelta, *, has_watchdog: bool
) -> World:
    """Return this rank's world; `store` is that of this launch."""
    # A connection of our own: torch's process groups may wait on the first one.
    own_store = store.clone()
    liveness = Liveness(own_store, launch_info, timeout, store_rank=None if launch_info.has_agent_store else 0)
    if liveness.tree.connect_error is not None:
        _log.warning(
            "rank %d can't connect to rank %d (%s), so it takes up to run.timeout to notice that a rank is lost; set "
            "MASTER_ADDR to an address that all nodes reach",
            launch_info.rank, liveness.tree.parent, liveness.tree.connect_error,
        )  # fmt: skip
    messages = RankStore(own_store.in_scope("messages"))
    joined = World(
        launch_info.rank, launch_info.size, device, liveness, messages, timeout, launch_info.local_size,
        launch_info.local_rank,
    )  # fmt: skip
    launcher = find_launcher(os.environ, launch_info)
    if launcher is not None and not launcher.has_ended:  # a rank may pass the variables on to ranks of its own
        joined = replace(joined, launcher=launcher)
    if has_watchdog:
        joined = replace(joined, watchdog=Watchdog(joined.find_fatal_error))
    return joined


def _touch(device: torch.device) -> None:
    """Use the device once, so that a broken or busy one fails here, before the other ranks depend on this one."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        raise MeshError(
            f"run.device={device} can't be used ({short_reason(error)}); check it with nvidia-smi"
        ) from error


def _initialize_process_groups(joined: World, store: SignedStore, backend: str) -> None:
    """Connect all ranks; the watchdog runs already, since NCCL would wait forever for a rank that fails meanwhile."""
    joined.set_status(f"{WAITING} for all ranks to initialize {backend}")
    if joined.device.type == "cpu":
        # torch keeps a record of the last 2,000 collectives. Among the tensors of a step, in the same heap, these small
        # pieces of memory keep a process from reusing what it has freed: it grew by up to 1 MB per step.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    dist.init_process_group(
        backend,
        timeout=group_timeout(backend, joined.timeout),
        world_size=joined.size,
        rank=joined.rank,
        store=PrefixStore("groups", store.unsigned),
    )  # without device_id, which would make each later group a collective of all ranks
    joined.set_status("starting")
