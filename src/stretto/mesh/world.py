"""World: this rank among all ranks of the job, the collectives over all of them, and the errors for lost peers."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.base.device_copy import to_device
from stretto.base.errors import SHARED_ERRORS, LostPeerError, MeshError, StrettoError
from stretto.mesh.c10d import HashStore
from stretto.mesh.launcher_watch import Launcher
from stretto.mesh.liveness import WAITING, Failure, Liveness
from stretto.mesh.rank_store import RankStore
from stretto.mesh.signed_store import SignedStore
from stretto.mesh.strict import is_strict
from stretto.mesh.topology import Topology
from stretto.mesh.wait_timer import WaitTimer
from stretto.mesh.watchdog import Watchdog

TIMEOUT = timedelta(minutes=10)  # how long a rank waits for others by default
# NCCL's own timeout ends a process without saying why, so our watchdog's comes first.
_NCCL_MARGIN = timedelta(minutes=1)


def group_timeout(backend: str, timeout: timedelta) -> timedelta:
    """Return the timeout of a process group, so that this rank gives up on others after `timeout`."""
    return timeout if backend == dist.Backend.GLOO else timeout + _NCCL_MARGIN


@dataclass(frozen=True)
class World:
    """This rank among all ranks of the job, and the collectives over all of them. A single rank never waits.

    Every rank must call the same collectives in the same order. If another rank is lost or fails meanwhile, calls raise
    `LostPeerError`, or the error that the other rank has published.
    """

    rank: int
    size: int
    device: torch.device
    liveness: Liveness | None = None  # None for a single rank
    # Short messages between ranks.
    store: RankStore = field(default_factory=lambda: RankStore(SignedStore(HashStore())))
    timeout: timedelta = TIMEOUT
    local_size: int = 1  # number of ranks on this node
    local_rank: int = 0  # among them
    watchdog: Watchdog | None = None  # ends this rank if it waits for a lost one; None with gloo, which raises errors
    launcher: Launcher | None = None  # the parent process, if this rank ends when that has ended
    topology: Topology | None = None  # set by `Mesh`, so that errors name the replica and stage of a rank
    group: dist.ProcessGroup | None = None  # of the ranks; None: all ranks of the job

    @cached_property
    def wait_timer(self) -> WaitTimer:
        """Measures how long this rank waits for others. `Mesh.world` is a copy of its world, with its own timer."""
        return WaitTimer(self.device)

    @property
    def is_single_rank(self) -> bool:
        """Whether this is the only rank."""
        return self.size == 1

    @property
    def is_strict(self) -> bool:
        """Whether ranks on the CPU follow NCCL's rules, because of `STRETTO_BACKEND=strict`."""
        return not self.is_single_rank and is_strict()

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0, which writes what only one rank may write."""
        return self.rank == 0

    def first_ranks(self, num_ranks: int) -> "World":
        """Return the world of the job's first `num_ranks` ranks. Only these ranks call this.

        The other ranks must then call `add_own_groups`, before all ranks together create a group again.
        """
        if num_ranks == self.size:
            return self
        if num_ranks == 1:
            return World(0, 1, self.device)
        group = self.new_group(range(num_ranks))
        return replace(self, size=num_ranks, local_size=min(self.local_size, num_ranks), group=group)

    def add_own_groups(self, num_groups: int) -> None:
        """Create groups of only this rank, as many as other ranks have created in a world of their own.

        torch names a group after its ranks and the number of groups that exist on the rank, so these must be equal.
        """
        for _ in range(num_groups):
            self.new_group([self.rank])

    def new_group(self, ranks: Iterable[int], backend: str | None = None) -> dist.ProcessGroup:
        """Create a group of ranks. Only its members call this, so no rank waits for groups it is not in."""
        timeout = group_timeout(backend or dist.get_backend(), self.timeout)
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.sum_over_ranks(torch.zeros(1, device=self.device), "barrier")

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all ranks."""
        return self.sum_over_ranks(to_device(torch.tensor(values, dtype=torch.float64), self.device))

    def sum_over_ranks(self, tensor: Tensor, name: str = "all_reduce") -> list[float]:
        """Return the elements of a vector, summed over all ranks; the vector is overwritten.

        On an accelerator, the host waits for the device here.
        """
        return [float(value) for value in self._sum(tensor, name).tolist()]

    def _sum(self, tensor: Tensor, name: str) -> Tensor:
        """Return the sum of a tensor over all ranks, on the CPU; the tensor is overwritten."""
        if self.is_single_rank:
            return tensor.cpu()
        with self.collective(name):
            dist.all_reduce(tensor, group=self.group)
            total = tensor.cpu()
        if self.watchdog is not None:
            self.watchdog.block_if_ending()
        self.block_if_store_is_lost()
        return total

    def gather(self, values: Sequence[float]) -> list[list[float]] | None:
        """On rank 0, return each rank's values, by rank; elsewhere, None. Ranks may pass different numbers of values.

        This is an all-reduce in which each rank fills its own part and leaves zeros elsewhere, so rank 0 doesn't
        receive from every rank in turn. Each rank needs memory for all values.

            rank 0   [ 1. 2. | 0. | 0. 0. 0. ]
            rank 1   [ 0. 0. | 3. | 0. 0. 0. ]   sum   [ 1. 2. | 3. | 4. 5. 6. ]
            rank 2   [ 0. 0. | 0. | 4. 5. 6. ]
        """
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(values)
        sizes_by_rank = [int(size) for size in self.sum_over_ranks(sizes, "gather")]
        parts = torch.zeros(sum(sizes_by_rank), dtype=torch.float64)
        torch.split(parts, sizes_by_rank)[self.rank].copy_(torch.tensor(values, dtype=torch.float64))
        gathered = iter(self.sum_over_ranks(to_device(parts, self.device), "gather"))
        return [list(islice(gathered, size)) for size in sizes_by_rank] if self.is_rank_zero else None

    def gather_rows(self, values: Sequence[float]) -> Tensor:
        """Return, on every rank, a matrix on the CPU with a row of values per rank; all ranks pass the same number.

        Like `gather`, this is an all-reduce in which each rank fills its own row; it needs one, `gather` two.
        """
        rows = torch.zeros(self.size, len(values), dtype=torch.float64)
        rows[self.rank] = torch.tensor(values, dtype=torch.float64)
        return self._sum(to_device(rows, self.device), "gather")

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return rank `source`'s tensor on every rank. The others pass a buffer of its shape and dtype to overwrite."""
        if not self.is_single_rank:
            tensor = tensor.contiguous()
            with self.collective("broadcast"):
                dist.broadcast(tensor, source, group=self.group)
        return tensor

    def broadcast_text(self, text: str, source: int = 0) -> str:
        """Return the `text` of rank `source` on every rank."""
        return self.broadcast_bytes(text.encode(), source).decode()

    def broadcast_bytes(self, content: bytes, source: int = 0) -> bytes:
        """Return the `content` of rank `source` on every rank."""
        if self.is_single_rank:
            return content
        # Only the source has a length other than zero, so the sum broadcasts it.
        is_source = self.rank == source
        (num_bytes,) = self.all_reduce([float(len(content) if is_source else 0)])
        if not num_bytes:
            return b""
        buffer = torch.empty(int(num_bytes), dtype=torch.uint8)
        if is_source:
            buffer.numpy()[:] = memoryview(content)
        return self.broadcast(buffer.to(self.device), source).cpu().numpy().tobytes()

    @contextmanager
    def fail_together(self, activity: str) -> Iterator[None]:
        """Wait for all ranks at the end of this context; if a rank failed in it, raise its error on every rank.

        Without this, the others would wait in their next collective for a rank that is gone. If several ranks failed,
        the error of the first of them is raised. `activity` is this rank's status meanwhile.
        """
        self.set_status(activity)
        error: StrettoError | None = None
        try:
            yield
        except MeshError:
            raise  # about the connection between the ranks, which are told in another way
        except StrettoError as caught:
            error = caught
        if self.is_single_rank:
            if error is not None:
                raise error
            return
        (num_failed,) = self.all_reduce([float(error is not None)])
        if num_failed:
            failed = torch.zeros(self.size, device=self.device)
            failed[self.rank] = error is not None
            first = self.sum_over_ranks(failed).index(1.0)
            raise _decode_error(self.broadcast_text("" if error is None else _encode_error(error), first)) from error

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Run a collective in this context: its time counts as waiting, its name is published as this rank's status."""
        self.set_status(f"{WAITING} for all ranks in {name}")
        wait_started = self.wait_timer.begin()
        with self.explain_errors(f"{WAITING} in {name}"):
            yield
        self.wait_timer.end(wait_started)
        self.set_status(f"after {name}")

    @contextmanager
    def explain_errors(self, activity: str) -> Iterator[None]:
        """Replace torch's RuntimeError with a published error or one about a lost or slow peer, if there is one."""
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            # gloo raises a plain RuntimeError after a timeout; only the elapsed time distinguishes it from others.
            cause = self._find_cause(activity, has_timed_out=time.monotonic() - started >= self.timeout.total_seconds())
            if cause is None:
                raise
            raise cause from error

    def transfer_error(self, peer: int, activity: str) -> StrettoError:
        """Return the error for a failed send to, or receive from, one peer; it may say "while {activity}"."""
        has_timed_out = self.liveness is not None and self.liveness.has_waited(self.timeout.total_seconds())
        cause = self._find_cause(activity, has_timed_out=has_timed_out)
        return cause or self._describe(Failure("slow", peer, None), activity)

    def _find_cause(self, activity: str, *, has_timed_out: bool) -> StrettoError | None:
        """Return the error for a failed operation with other ranks; None if none of them has failed."""
        self._block_if_ending()
        failure = None if self.liveness is None else self.liveness.find_failure(asks=has_timed_out)
        return None if failure is None else self._describe(failure, activity)

    def _block_if_ending(self) -> None:
        if self.launcher is not None:
            self.launcher.block_if_ended()

    def block_if_store_is_lost(self, seconds: float = 0.0) -> None:
        """Never return if this rank's launcher has ended with the store that a save needs: its watch ends this rank.

        Wait up to `seconds` for the launcher to end, if the store does not answer.
        """
        if self.launcher is not None:
            self.launcher.block_if_store_is_lost(seconds)

    def set_status(self, status: object) -> None:
        """Set what this rank is doing, which other ranks report if this one is lost."""
        if self.liveness is not None:
            self.liveness.set_status(status)

    @property
    def status(self) -> object:
        """What this rank is doing, as last set."""
        return None if self.liveness is None else self.liveness.status

    def publish_error(self, error: StrettoError, print_error: Callable[[], None] = lambda: None) -> None:
        """Publish the error that ends this rank, so that all others end with the same error.

        `print_error` is called on one rank only, the first to publish: an error on every rank is printed once.
        """
        if self.liveness is None:
            print_error()
            return
        self.stop_watchdog(says_goodbye=False)
        self.liveness.publish_error(_encode_error(error), print_error)

    def stop_watchdog(self, *, says_goodbye: bool) -> None:
        """Stop watching the other ranks. Without a goodbye, they see this one as lost as soon as its process ends."""
        if self.watchdog is not None:
            self.watchdog.stop()
        if self.liveness is not None and says_goodbye:
            self.liveness.stop(says_goodbye=True)

    def raise_failure(self) -> None:
        """Raise the error that another rank has published, or one about a lost rank, if this rank has learned of it."""
        error = self._known_failure()
        if error is not None:
            raise error

    def _known_failure(self) -> StrettoError | None:
        if self.liveness is None:
            return None
        failure, status = self.liveness.failure, str(self.liveness.status)
        activity = status if status.startswith(WAITING) else "running"
        return None if failure is None else self._describe(failure, activity)

    def find_fatal_error(self) -> StrettoError | None:
        """Return the error that must end this rank, for its watchdog."""
        self._block_if_ending()
        if self.liveness is None or (error := self._known_failure()) is not None:
            return error
        if not self.liveness.has_waited(self.timeout.total_seconds()):
            return None
        activity = str(self.liveness.status)
        # The others then name the same rank, and that rank ends too if it can.
        return self._find_cause(activity, has_timed_out=True) or LostPeerError(
            f"rank {self.rank} gave up after {self.timeout.total_seconds():.0f} s, while {activity}; its peers "
            "are waiting too: check that all ranks run the same code with the same config"
        )

    def _describe(self, failure: Failure, activity: str) -> StrettoError:
        """Return the error that ends this rank after a failure; it may say "while {activity}"."""
        if failure.kind == "error":
            return _decode_error(failure.text or "")
        if failure.rank == self.rank:  # other ranks have reported this one
            return LostPeerError(
                f"the other ranks could not reach rank {self.rank} and gave up on it while it was {activity}; "
                "if the network was interrupted, restart this node's ranks"
            )
        name = self._describe_rank(failure)
        if failure.kind == "lost":
            return LostPeerError(
                f"rank {self.rank} lost {name} while {activity}; check that rank's output for the cause"
            )
        return LostPeerError(
            f"rank {self.rank} gave up on {name} after {self.timeout.total_seconds():.0f} s, while {activity}; "
            "that rank is alive but makes no progress: check its output, or raise run.timeout"
        )

    def _describe_rank(self, failure: Failure) -> str:
        """Return a rank with its position and status: `rank 3 (replica 1, stage 0, last seen in F0.1 of window 9)`."""
        # An elastic layout may leave ranks out.
        topology = self.topology
        is_in_layout = topology is not None and failure.rank < topology.size
        details = [str(topology.position(failure.rank))] if topology is not None and is_in_layout else []
        details += [] if failure.text is None else [f"last seen {failure.text}"]
        return f"rank {failure.rank} ({', '.join(details)})" if details else f"rank {failure.rank}"


def _encode_error(error: StrettoError) -> str:
    """Return an error as a text for other ranks: the name of its class, and its message."""
    error_class = next((shared for shared in SHARED_ERRORS if isinstance(error, shared)), StrettoError)
    return f"{error_class.__name__}\n{error}"


def _decode_error(text: str) -> StrettoError:
    class_name, _, message = text.partition("\n")
    return next((shared for shared in SHARED_ERRORS if shared.__name__ == class_name), StrettoError)(message)
