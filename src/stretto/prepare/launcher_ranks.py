"""Ranks of a launcher that prepare data together: they communicate only through files in the work folder.

data/book.partial/parts/
  leader                  rank 0's token and heartbeat, see `leader_lock`: the others join when they see it change
  3f9c61d0/               named by the token, so that nothing of an earlier start counts
    open-write            the parts of this phase can be claimed; a new number in it means: list claims again
    claims-write/00007    the rank that prepares a part; a file that only one rank can create
    result-write          what rank 0 made of the results of all parts
    ranks/3               heartbeat of a rank that has joined; only one process can create it
    error                 the error of a rank, the first one
    outcome               that everything is prepared, or the error that all ranks raise
    left/3                a rank that has read the outcome
"""

import json
import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from stretto.base.errors import DataError
from stretto.base.fingerprint import fingerprint
from stretto.base.jitter import jitter
from stretto.base.reason import class_and_reason
from stretto.prepare.leader_lock import heartbeat, read_leader, read_or_empty
from stretto.prepare.work_folder import LEADER, PARTS, WorkFolder

_RANK_BEAT_SECONDS = 5.0  # less often than rank 0, as there may be thousands
_POLL_SECONDS = 0.3  # the first pause, and the longest one
_MAX_POLL_SECONDS = 3.0
_START_FACTOR = 5  # ranks may start minutes apart, so rank 0 is waited for longer than it may be silent later
_REPORT_SECONDS = 10.0  # for rank 0 to report its error
_LISTING_PAUSE = 10  # rank 0 lists results for at most a tenth of its time


@dataclass(frozen=True)
class Ranks:
    """Which of the ranks that a launcher has started this process is; all of them make the same call."""

    rank: int
    size: int
    lost_after: float = 60.0  # seconds without a heartbeat after which the parts of a rank are prepared by others

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise DataError(f"rank={self.rank} must be from 0 to size - 1, which is {self.size - 1}")


class RankZeroError(DataError):
    """The error that rank 0 raises too: all ranks end with the same one."""


class Runner(Protocol):
    """Prepares parts of a phase and saves their results."""

    @property
    def name(self) -> str: ...
    def __call__(self, number: int, part: Any, /) -> int: ...  # noqa: ANN401 - the parts of any phase
    def result_names(self, parts: Iterable[tuple[int, Any]], /) -> dict[str, int]: ...
    def finished(self, result_names: Mapping[str, int], /) -> set[int]: ...


@dataclass
class RankSession:
    """What one rank does in a preparation: rank 0 leads, the others help."""

    ranks: Ranks
    folder: WorkFolder
    token: str
    _beats: dict[str, tuple[bytes, float]] = field(default_factory=dict)  # of each rank: the last one, and when it came

    @property
    def is_leader(self) -> bool:
        return self.ranks.rank == 0

    def start(self) -> None:
        """Create the session's folder."""
        self._write("size", self.ranks.size)

    def lead(
        self, runner: Runner, parts: Sequence[Any], unfinished: Sequence[tuple[int, Any]]
    ) -> Generator[int, None, None]:
        """Prepare the unfinished of all parts with all ranks; yield the number of each when it is finished."""
        missing, num_opened = dict(unfinished), 0
        result_names = runner.result_names(enumerate(parts))
        key, pauses, listing = fingerprint(list(result_names)), _Pauses(), RareListing()
        self._write(f"open-{runner.name}", {"parts": key, "number": num_opened})
        claims, is_waiting = self._claim(runner.name, missing, set()), False
        while missing:
            self._raise_reported()
            claimed = next(claims, None)
            if claimed is None and is_waiting:
                if self._release_lost(runner.name, missing):
                    num_opened += 1
                    self._write(f"open-{runner.name}", {"parts": key, "number": num_opened})
                    claims = self._claim(runner.name, missing, set())
                pauses.wait()
            elif claimed in missing:  # else a rank that was believed lost has finished it
                runner(claimed, missing[claimed])
            is_waiting = claimed is None  # for the other ranks to finish their parts
            if not is_waiting and not listing.is_due():
                continue
            with listing:
                finished = runner.finished(result_names)
            for number in sorted(finished & missing.keys()):
                del missing[number]
                pauses = _Pauses()
                yield number

    def help(self, runner: Runner, parts: Sequence[Any]) -> Any:  # noqa: ANN401 - JSON
        """Prepare parts until rank 0 has published what it made of all results; return that."""
        last_opened, pauses = None, _Pauses()
        result_names = runner.result_names(enumerate(parts))
        key = fingerprint(list(result_names))
        while True:
            names = self._look()
            if f"result-{runner.name}" in names:
                return self._read(f"result-{runner.name}")
            if "outcome" in names:
                raise _OutcomeError
            if f"open-{runner.name}" in names and (opened := self._read(f"open-{runner.name}")) != last_opened:
                last_opened, pauses = opened, _Pauses()
                done = runner.finished(result_names)
                with self._reported():
                    if opened["parts"] != key:
                        problem = f"rank {self.ranks.rank} sees other sizes or times of the input files than rank 0"
                        raise DataError(f"{problem}; start again when they are no longer written")
                    for number in self._claim(runner.name, range(len(parts)), done):
                        runner(number, parts[number])
                        if self._look().keys() & {"error", "outcome"}:
                            break
            else:
                pauses.wait()

    def publish(self, name: str, result: Any) -> None:  # noqa: ANN401 - JSON
        """Tell the other ranks the result of a phase."""
        self._write(f"result-{name}", result)

    def close(self, error: BaseException | None) -> None:
        """Tell the other ranks that all is prepared, or why not, and wait until they have read it."""
        if not isinstance(error, Exception | None):  # Ctrl-C: don't wait
            self._write("outcome", {"error": "rank 0 was interrupted; start all ranks again to resume"})
            return
        # A small job may be over before all ranks have started.
        self._wait_for("ranks", {str(rank) for rank in range(1, self.ranks.size)})
        if error is None and "error" in self._names(""):
            error = DataError(self._read("error"))
        self._write("outcome", {"error": None if error is None else _message(error, 0)})
        self._wait_for("left", self._names("ranks").keys())
        if error is not None:
            raise error

    def await_outcome(self) -> None:
        """Wait until rank 0 says that all is prepared, or why not."""
        pauses = _Pauses()
        while "outcome" not in self._look():
            pauses.wait()

    def leave(self, is_complete: Callable[[], bool]) -> None:
        """Raise the error of the outcome, or return when the target is complete."""
        message = self._read("outcome")["error"]
        self.folder.create(self._path(f"left/{self.ranks.rank}"), b"")
        if message is not None:
            self._await_report()
            raise RankZeroError(message)
        until = time.monotonic() + self.ranks.lost_after
        while not is_complete():
            if time.monotonic() > until:
                raise DataError(f"{self.folder.target} is not complete, but rank 0 has ended; start all ranks again")
            time.sleep(jitter(_POLL_SECONDS))

    def _await_report(self) -> None:
        """Wait until rank 0 has raised its error: a launcher may end all ranks when the first one ends."""
        until = time.monotonic() + _REPORT_SECONDS
        while time.monotonic() < until and read_or_empty(self.folder, LEADER):
            time.sleep(jitter(_POLL_SECONDS))
        time.sleep(_POLL_SECONDS)

    def report(self, error: Exception) -> None:
        """Tell rank 0 about an error of this rank; the first one counts."""
        self.folder.create(self._path("error"), json.dumps(_message(error, self.ranks.rank)).encode())

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - all ranks raise it, when rank 0 has read it
            self.report(error)

    def _claim(self, name: str, numbers: Sequence[int] | Mapping[int, Any], done: set[int]) -> Iterator[int]:
        """Yield the parts that this rank claims, one by one: first its own share, then what others have not begun."""
        taken, ordered = self._claimed(name), list(numbers)
        start, stop = (rank * len(ordered) // self.ranks.size for rank in (self.ranks.rank, self.ranks.rank + 1))
        # In an order of its own: ranks that all went through them in the same one would claim the same, part for part.
        others = [*ordered[stop:], *ordered[:start]]
        random.Random(self.ranks.rank).shuffle(others)
        for number in (*ordered[start:stop], *others):
            if number in taken or number in done:
                continue
            if self.folder.create(self._path(f"claims-{name}/{number:05}"), str(self.ranks.rank).encode()):
                yield number
            else:
                taken = self._claimed(name)

    def _claimed(self, name: str) -> set[int]:
        return {int(number) for number in self._names(f"claims-{name}") if number.isdecimal()}

    def _release_lost(self, name: str, missing: Mapping[int, Any]) -> bool:
        """Remove the claims of ranks without a heartbeat, so that the parts can be claimed again."""
        claims = self._claimed(name) & missing.keys()
        owners = {number: self._content(f"claims-{name}/{number:05}").decode() for number in claims}
        # A claim without an owner is of a rank that was lost as it wrote it; no heartbeat has this name.
        lost = {owner for owner in set(owners.values()) if not self._is_alive(owner or "unknown")}
        released = [self._path(f"claims-{name}/{number:05}") for number, owner in owners.items() if owner in lost]
        self.folder.remove(released)
        return bool(released)

    def _is_alive(self, rank: str) -> bool:
        """Whether the heartbeat of a rank has changed lately; the clocks of two machines are never compared."""
        beat, now = self._content(f"ranks/{rank}"), time.monotonic()
        last, since = self._beats.get(rank, (b"", now))
        if rank not in self._beats or beat != last:
            self._beats[rank] = beat, now
            return True
        return now - since < self.ranks.lost_after

    def _wait_for(self, folder: str, expected: Iterable[str]) -> None:
        """Wait until the folder has a file of each of these ranks; a rank that is lost or late is not waited for."""
        until = time.monotonic() + self.ranks.lost_after
        while missing := set(expected) - self._names(folder).keys():
            joined = missing & self._names("ranks").keys()
            # A rank with a heartbeat may have to finish its part before it looks.
            alive = [rank for rank in joined if self._is_alive(rank)]
            if time.monotonic() > until and not alive:
                return
            time.sleep(jitter(_POLL_SECONDS))

    def _look(self) -> dict[str, int]:
        """Return the names in the session's folder; raise if rank 0 was lost, or has started again without us."""
        names = self._names("")
        if "outcome" in names:
            return names
        if read_leader(self.folder)[1].get("token", self.token) != self.token:
            raise DataError("rank 0 was started again; start all ranks with it")
        if not self._is_alive("leader"):
            seconds = f"{self.ranks.lost_after:.0f} s"
            raise DataError(f"rank 0 has not been heard from for {seconds}; start all ranks again to resume")
        return names

    def _raise_reported(self) -> None:
        if "error" in self._names(""):
            raise DataError(self._read("error"))

    def _names(self, folder: str) -> dict[str, int]:
        return self.folder.sizes(self._path(folder).rstrip("/"))

    def _read(self, name: str) -> Any:  # noqa: ANN401 - JSON
        return json.loads(self.folder.read(self._path(name)))

    def _content(self, name: str) -> bytes:
        return read_or_empty(self.folder, LEADER if name == "ranks/leader" else self._path(name))

    def _write(self, name: str, content: Any) -> None:  # noqa: ANN401 - JSON
        self.folder.write(self._path(name), json.dumps(content).encode())

    def _path(self, name: str) -> str:
        return f"{PARTS}/{self.token}/{name}"


class _OutcomeError(Exception):
    """Rank 0 has ended with an error before this rank got what it asked for; `leave` raises that error."""


class RareListing:
    """Says when rank 0 may list the results again: it spends little of its time on that, however many there are."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._started, self._due = clock, 0.0, clock()

    def is_due(self) -> bool:
        return self._clock() >= self._due

    def __enter__(self) -> None:
        self._started = self._clock()

    def __exit__(self, *_: object) -> None:
        now = self._clock()
        self._due = now + _LISTING_PAUSE * (now - self._started)


class _Pauses:
    """Pauses between two looks at the folder; they grow, so that many ranks that wait for long ask rarely."""

    def __init__(self) -> None:
        self._seconds = _POLL_SECONDS

    def wait(self) -> None:
        time.sleep(jitter(self._seconds))
        self._seconds = min(1.5 * self._seconds, _MAX_POLL_SECONDS)


@contextmanager
def lead_ranks(ranks: Ranks, folder: WorkFolder, token: str) -> Iterator[RankSession]:
    """Let the other ranks join this process, which holds the lock; tell them the outcome at the end of the context."""
    session = RankSession(ranks, folder, token)
    session.start()
    try:
        yield session
    except BaseException as error:
        session.close(error)
        raise
    session.close(None)


@contextmanager
def join_ranks(
    ranks: Ranks, folder: WorkFolder, fingerprint: str, is_complete: Callable[[], bool]
) -> Iterator[RankSession]:
    """Join rank 0; at the end of the context, raise its error or return when the target is complete."""
    session = RankSession(ranks, folder, _await_leader(ranks, folder, fingerprint))
    own_error: Exception | None = None
    name = f"{PARTS}/{session.token}/ranks/{ranks.rank}"
    if not folder.create(name, uuid4().hex.encode()):
        problem = f"is being prepared by another start, which has a rank {ranks.rank} too"
        raise DataError(f"{folder.target} {problem}; wait for it or choose a different folder")
    with heartbeat(folder, name, _RANK_BEAT_SECONDS):
        try:
            yield session
        except _OutcomeError as error:
            own_error = DataError(f"rank 0 has ended before rank {ranks.rank}; start all ranks again")
            own_error.__cause__ = error
        except Exception as error:  # noqa: BLE001 - all ranks raise it
            own_error = error
            session.report(error)
        session.await_outcome()
    # Without a heartbeat, which could write to a folder that rank 0 removes when all have left.
    session.leave(is_complete)
    if own_error is not None:
        raise own_error


def _await_leader(ranks: Ranks, folder: WorkFolder, fingerprint: str) -> str:
    """Return the token of rank 0 when its heartbeat is seen: the file may be from a start that was killed."""
    start_timeout = _START_FACTOR * ranks.lost_after
    seen, until = read_leader(folder), time.monotonic() + start_timeout
    while time.monotonic() < until:
        time.sleep(jitter(_POLL_SECONDS))
        content, leader = read_leader(folder)
        if content != seen[0] and leader.get("token", "") == seen[1].get("token"):
            if leader["fingerprint"] != fingerprint:
                problem = "rank 0 has other files or options than"
                raise DataError(f"{problem} rank {ranks.rank}; start all ranks with the same command")
            if leader["size"] != ranks.size:
                problem = f"is being prepared by another start, whose number of ranks is {leader['size']}"
                remedy = "wait for it or choose a different folder"
                raise DataError(f"{folder.target} {problem}, not {ranks.size}; {remedy}")
            return str(leader["token"])
        seen = content, leader
    raise DataError(
        f"rank {ranks.rank} has waited {start_timeout:.0f} s for rank 0 in {folder.location}; check that all ranks "
        "see the same files, and start them again"
    )


def _message(error: Exception, rank: int) -> str:
    return str(error) if isinstance(error, DataError) else f"rank {rank}: {class_and_reason(error)}"
