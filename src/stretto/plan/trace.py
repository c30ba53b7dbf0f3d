"""Trace: what each rank did in one step and when, as a file of Chrome trace events that Perfetto opens too."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from stretto.base.errors import DataError
from stretto.plan.actions import Action, ActionKind
from stretto.plan.timeline import TimedAction, Timeline

Category = Literal["data", "forward", "backward", "optimizer"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
ACTION_KINDS: dict[Category, ActionKind] = {"forward": ActionKind.FORWARD, "backward": ActionKind.BACKWARD}
# Viewers take 0 for a process or thread that the system keeps for itself.
_PROCESS = 1


class TraceEvent(NamedTuple):
    """Something that a rank did, from when to when, in seconds."""

    category: Category
    start: float
    stop: float
    action: Action | None = None  # of forward and backward

    @classmethod
    def of(cls, span: TimedAction) -> "TraceEvent":
        """Return the work that a span tells of."""
        category: Category = "forward" if span.action.kind is ActionKind.FORWARD else "backward"
        return cls(category, span.start, span.stop, span.action)

    def __str__(self) -> str:
        if self.action is None:
            return self.category
        return f"{self.action.kind.value} micro-batch {self.action.micro_batch} chunk {self.action.chunk}"

    def shifted(self, seconds: float) -> "TraceEvent":
        """Return the same so many seconds later."""
        return self._replace(start=self.start + seconds, stop=self.stop + seconds)


@dataclass(frozen=True)
class RankTrace:
    """One rank, where it stands, and what it did."""

    rank: int
    replica: int
    stage: int
    events: tuple[TraceEvent, ...]

    def __str__(self) -> str:
        return f"rank {self.rank} (replica {self.replica}, stage {self.stage})"

    @property
    def timed_actions(self) -> tuple[TimedAction, ...]:
        """Its actions, as they were taken."""
        return tuple(TimedAction(self.stage, w.action, w.start, w.stop) for w in self.events if w.action is not None)

    @property
    def start(self) -> float:
        return min(work.start for work in self.events)


@dataclass(frozen=True)
class Trace:
    """One step on all ranks, on one clock that starts at nought."""

    step: int
    ranks: tuple[RankTrace, ...]

    @classmethod
    def of(cls, step: int, rows: Sequence[RankTrace]) -> "Trace":
        """Return a trace of rows whose clock starts somewhere."""
        first = min((row.start for row in rows if row.events), default=0.0)
        moved = (replace(row, events=tuple(work.shifted(-first) for work in row.events)) for row in rows)
        return cls(step, tuple(sorted(moved, key=lambda row: row.rank)))

    def timeline(self, replica: int = 0) -> Timeline:
        """Return the actions of one replica, for drawing; nought is its first action's start."""
        rows = [row for row in self.ranks if row.replica == replica]
        spans = [span for row in rows for span in row.timed_actions]
        first = min((span.start for span in spans), default=0.0)
        moved = [TimedAction(span.stage, span.action, span.start - first, span.stop - first) for span in spans]
        return Timeline(len(rows), tuple(sorted(moved, key=lambda span: (span.start, span.stage))))

    def to_json(self) -> str:
        """Return the trace as Chrome trace events, one a line."""
        events = ",\n".join(json.dumps(event) for event in self._events())
        return f'{{"displayTimeUnit": "ms", "otherData": {{"step": {self.step}}}, "traceEvents": [\n{events}\n]}}\n'

    @classmethod
    def from_json(cls, text: str, where: str = "the trace") -> "Trace":
        """Return the trace that `to_json` wrote."""
        try:
            file = json.loads(text)
            events_of: dict[int, list[TraceEvent]] = {}
            places: dict[int, dict[str, int]] = {}
            for event in file["traceEvents"]:
                if event["ph"] == "X":
                    events_of.setdefault(event["tid"], []).append(_read_event(event))
                elif event["name"] == "thread_name":
                    places[event["tid"]] = event["args"]
            rows = (
                RankTrace(place["rank"], place["replica"], place["stage"], tuple(events_of.get(thread, ())))
                for thread, place in places.items()
            )
            return cls(int(file["otherData"]["step"]), tuple(rows))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{where} is not a trace of a step ({error}); train again to write one") from None

    def _events(self) -> Iterator[dict[str, Any]]:
        yield _metadata("process_name", 0, {"name": f"step {self.step}"})
        for row in self.ranks:
            thread = row.rank + 1
            place = {"name": str(row), "rank": row.rank, "replica": row.replica, "stage": row.stage}
            yield _metadata("thread_name", thread, place)
            yield _metadata("thread_sort_index", thread, {"sort_index": row.rank})
            for work in row.events:
                yield {
                    "ph": "X",
                    "name": str(work),
                    "cat": work.category,
                    "pid": _PROCESS,
                    "tid": thread,
                    "ts": round(work.start * 1e6, 3),
                    "dur": round((work.stop - work.start) * 1e6, 3),
                    "args": {}
                    if work.action is None
                    else {"micro_batch": work.action.micro_batch, "chunk": work.action.chunk},
                }


def _metadata(name: str, thread: int, values: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": _PROCESS, "tid": thread, "args": values}


def _read_event(event: dict[str, Any]) -> TraceEvent:
    category: Category = event["cat"]
    start = float(event["ts"]) / 1e6
    kind = ACTION_KINDS.get(category)
    action = None if kind is None else Action(kind, event["args"]["micro_batch"], event["args"]["chunk"])
    return TraceEvent(category, start, start + float(event["dur"]) / 1e6, action)
