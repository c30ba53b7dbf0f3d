"""Liveness: what this rank knows of the failure that ends a run, and how it learns and tells of it.

A broken connection shows that some rank is lost, but not which one: the neighbors of the lost rank end as well, which
breaks their own connections. Only the parent and the children of a rank in the tree of ranks know: the rank was there,
and its connection to them broke before any report came. They report it to all ranks; the first report counts.

    rank 2 (killed)           rank 0 (its parent)              rank 1
    connection breaks   ───►  reports: rank 2 is lost   ───►   waits for a report when its own connections break

A rank whose collective has timed out asks all ranks; one that is not waiting for others says that it is the slow one.
While nothing fails, no rank asks anything, and the key-value store isn't used. A rank that can't reach a part of the
tree waits for a report in the store instead, and passes it on to the others.
"""

import json
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Literal, get_args

from stretto.mesh.launch_info import LaunchInfo
from stretto.mesh.rank_store import RankStore
from stretto.mesh.rank_tree import RankTree
from stretto.mesh.signed_store import SignedStore

WAITING = "waiting"
"""The first word of the status of a rank that is waiting for others."""

_FAILURE_KEY = "failure"
_ERROR_KEY = "error"
_PRINTED_KEY = "printed"
_QUESTION = "who is slow?"
# How long to wait for the store.
_ANSWER_TIMEOUT_SECONDS = 3.0
# How long to wait for a report. It takes milliseconds, or a bit longer on a busy node.
_REPORT_SECONDS = 5.0
# How long a question counts: meanwhile, no rank needs to ask it again.
_QUESTION_SECONDS = 5.0
# How long to wait before the store is used because a part of the tree has gone: a run that ends well ends meanwhile.
_CUT_OFF_SECONDS = 2.0

FailureKind = Literal["lost", "slow", "error"]


@dataclass(frozen=True)
class Failure:
    """Why a run ends: a rank is lost, or too slow, or has published an error."""

    kind: FailureKind
    rank: int
    text: str | None  # the last status of the rank, if it is known, or the error

    def dump(self) -> str:
        """Return the failure as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str | None) -> "Failure | None":
        """Return the failure in a text; None if there is none. Without a secret, anyone may have written the text."""
        try:
            values = json.loads(text or "")
            failure = Failure(values["kind"], values["rank"], values["text"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        is_valid = failure.kind in get_args(FailureKind) and type(failure.rank) is int and 0 <= failure.rank < 10**9
        return failure if is_valid and isinstance(failure.text, str | None) else None


class Liveness:
    """Watches the neighbors of this rank in the tree; reports failures and learns of those that others report.

    Every call survives the loss of the store: below, RuntimeError means that it is gone or does not answer.
    """

    def __init__(
        self, store: SignedStore, launch_info: LaunchInfo, timeout: timedelta, store_rank: int | None = None
    ) -> None:
        self.status: object = "starting"  # set by the main thread; the tree's thread converts it to text
        self.status_since = time.monotonic()  # when it was set
        self.failure: Failure | None = None  # the first that this rank has learned of
        self._rank, self._size = launch_info.rank, launch_info.size
        self._store = RankStore(store, _ANSWER_TIMEOUT_SECONDS)
        self._store_rank = store_rank  # the rank that hosts the store; None if an elastic agent does
        self._has_failed, self._is_stopped = threading.Event(), threading.Event()
        self._last_question = -math.inf
        self._store_watch: threading.Thread | None = None
        self.tree = RankTree(
            store, launch_info, timeout, lambda: str(self.status), self._on_message, self._on_lost, self._on_cut_off
        )
        self.tree.start()

    def set_status(self, status: object) -> None:
        """Set what this rank is doing, which other ranks report if this one is lost."""
        self.status, self.status_since = status, time.monotonic()

    def has_waited(self, seconds: float) -> bool:
        """Return whether this rank has been waiting for others for so long."""
        return str(self.status).startswith(WAITING) and time.monotonic() - self.status_since >= seconds

    def report(self, failure: Failure) -> None:
        """Tell all ranks of a failure, unless this one has learned of another before."""
        if self.failure is None:
            # Before this rank learns of it, because then it ends.
            self.tree.send(failure.dump())
            with suppress(RuntimeError):
                self._store.set_once(_FAILURE_KEY, failure.dump())
            self._learn(failure)

    def find_failure(self, *, asks: bool) -> Failure | None:
        """Wait for a report of a failure; None if there is none. If this rank `asks`, a slow rank reports itself."""
        if asks and self.failure is None and self._is_new_question():
            self.tree.expect_heartbeats()
            self.tree.send(_QUESTION)
        has_failed = self._has_failed.wait(_REPORT_SECONDS)
        if not has_failed and self._last_question > -math.inf:  # this rank or another has asked
            # The neighbors of a frozen rank must first miss a few heartbeats.
            has_failed = self._has_failed.wait(self.tree.max_silence)
        if not has_failed:
            self.read_store()
        if self.failure is None:
            with suppress(RuntimeError):
                child = self.tree.find_ended_child()
                if child is not None:
                    self.report(Failure("lost", child, None))
        return self.failure

    def read_store(self) -> None:
        """Learn of a failure from the store, and pass it on to the neighbors in the tree."""
        try:
            error = self._store.get(_ERROR_KEY)
            failure = self._parse(self._store.get(_FAILURE_KEY))
            if error is not None:
                # As `publish_error` writes it; an unsigned text may have anything in place of the rank.
                rank, _, text = error.partition("\n")
                failure = Failure("error", int(rank) if self._is_rank(rank) else 0, text)
        except RuntimeError:
            failure = None if self._store_rank is None else Failure("lost", self._store_rank, None)
        if failure is not None and self.failure is None:
            self.tree.send(failure.dump())
            self._learn(failure)

    def publish_error(self, error: str, print_error: Callable[[], None]) -> None:
        """Tell all ranks of the error that ends this one and call `print_error`, unless another rank has done so.

        The other ranks wait until it is printed, because a launcher ends all ranks as soon as one has ended.
        """
        if self.failure is not None and self.failure.kind == "error":
            return  # a rank reports its error after it has printed it
        is_first = True
        with suppress(RuntimeError):
            # The value starts with the rank number: if two ranks publish the same error, only one of them is first.
            is_first = self._store.set_once(_ERROR_KEY, f"{self._rank}\n{error}")
        if is_first:
            print_error()
        with suppress(RuntimeError):
            if is_first:
                self._store.set(_PRINTED_KEY, "1")
            else:
                self._store.wait_for_keys([_PRINTED_KEY], _ANSWER_TIMEOUT_SECONDS)
        if is_first:
            self.report(Failure("error", self._rank, error))

    def stop(self, *, says_goodbye: bool) -> None:
        """Stop watching. Without a goodbye, the other ranks see this one as lost."""
        self._is_stopped.set()
        self.tree.stop(says_goodbye=says_goodbye)
        if self._store_watch is not None:
            self._store_watch.join(_ANSWER_TIMEOUT_SECONDS)

    def _learn(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure
            self._has_failed.set()

    def _is_rank(self, text: str) -> bool:
        return text.isascii() and text.isdecimal() and len(text) < 10 and int(text) < self._size

    def _parse(self, text: str | None) -> Failure | None:
        failure = Failure.parse(text)
        return failure if failure is not None and failure.rank < self._size else None

    def _is_new_question(self) -> bool:
        """Return whether the question was not asked just before; if so, it is now."""
        now = time.monotonic()
        is_new = now - self._last_question > _QUESTION_SECONDS
        if is_new:
            self._last_question = now
        return is_new

    def _on_lost(self, rank: int, status: str | None) -> None:
        self.report(Failure("lost", rank, status))

    def _on_message(self, text: str, source: int) -> None:
        if self.failure is not None:
            return
        if text == _QUESTION:
            if self._is_new_question():
                self.tree.expect_heartbeats()
                self.tree.send(text, source)
                status = str(self.status)
                if not status.startswith(WAITING):
                    self.report(Failure("slow", self._rank, status))
        elif (failure := self._parse(text)) is not None:
            self.tree.send(text, source)
            self._learn(failure)

    def _on_cut_off(self) -> None:
        if self._store_watch is None and not self._is_stopped.is_set():
            self._store_watch = threading.Thread(target=self._watch_store, daemon=True)
            self._store_watch.start()

    def _watch_store(self) -> None:
        """Wait until a failure is in the store."""
        # If the store is gone, this rank's next operation fails.
        with suppress(_NoLongerNeededError, RuntimeError):
            self.tree.publish_connect_error()
            if not self._is_stopped.wait(_CUT_OFF_SECONDS):
                self._store.wait_for_keys([_FAILURE_KEY], math.inf, self._raise_if_not_needed)
                self.read_store()

    def _raise_if_not_needed(self) -> None:
        if self._is_stopped.is_set() or self.failure is not None:
            raise _NoLongerNeededError


class _NoLongerNeededError(Exception):
    """Ends the wait for a failure in the store."""
