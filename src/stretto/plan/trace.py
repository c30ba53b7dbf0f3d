"""A trace of one step: what each rank did and when, as Chrome trace events, which Perfetto opens too."""

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
# Viewers treat 0 as a process or thread of the system.
_PROCESS_ID = 1


class TraceEvent(NamedTuple):
    """One activity of a rank, with start and stop in seconds."""

    category: Category
    start: float
    stop: float
    action: Action | None = None  # of a forward or backward

    @classmethod
    def of(cls, timed: TimedAction) -> "TraceEvent":
        """Return the event of a timed action."""
        category: Category = "forward" if timed.action.kind is ActionKind.FORWARD else "backward"
        return cls(category, timed.start, timed.stop, timed.action)

    def __str__(self) -> str:
        if self.action is None:
            return self.category
        return f"{self.action.kind.value} micro-batch {self.action.micro_batch} chunk {self.action.chunk}"

    def shifted(self, seconds: float) -> "TraceEvent":
        """Return the event `seconds` later."""
        return self._replace(start=self.start + seconds, stop=self.stop + seconds)


@dataclass(frozen=True)
class RankTrace:
    """One rank, its place in the layout, and its events."""

    rank: int
    replica: int
    stage: int
    events: tuple[TraceEvent, ...]

    def __str__(self) -> str:
        return f"rank {self.rank} (replica {self.replica}, stage {self.stage})"

    @property
    def timed_actions(self) -> tuple[TimedAction, ...]:
        """Its forwards and backwards."""
        return tuple(
            TimedAction(self.stage, event.action, event.start, event.stop)
            for event in self.events
            if event.action is not None
        )


@dataclass(frozen=True)
class Trace:
    """One step on all ranks, on one clock that starts at 0."""

    step: int
    ranks: tuple[RankTrace, ...]

    @classmethod
    def of(cls, step: int, rows: Sequence[RankTrace]) -> "Trace":
        """Return a trace from ranks whose common clock starts at any time."""
        first = min((event.start for row in rows for event in row.events), default=0.0)
        shifted = (replace(row, events=tuple(event.shifted(-first) for event in row.events)) for row in rows)
        return cls(step, tuple(sorted(shifted, key=lambda row: row.rank)))

    def timeline(self, replica: int = 0) -> Timeline:
        """Return the timeline of one replica; it starts at 0 with the first action."""
        rows = [row for row in self.ranks if row.replica == replica]
        timed_actions = [timed for row in rows for timed in row.timed_actions]
        first = min((timed.start for timed in timed_actions), default=0.0)
        shifted = [timed._replace(start=timed.start - first, stop=timed.stop - first) for timed in timed_actions]
        return Timeline(len(rows), tuple(sorted(shifted, key=lambda timed: (timed.start, timed.stage))))

    def to_json(self) -> str:
        """Return the trace as Chrome trace events in JSON, one per line."""
        events = ",\n".join(json.dumps(event) for event in self._events())
        return f'{{"displayTimeUnit": "ms", "otherData": {{"step": {self.step}}}, "traceEvents": [\n{events}\n]}}\n'

    @classmethod
    def from_json(cls, text: str, source: str = "the trace") -> "Trace":
        """Parse what `to_json` wrote; `source` names the text in errors."""
        try:
            values = json.loads(text)
            events: dict[int, list[TraceEvent]] = {}  # by thread
            places: dict[int, dict[str, int]] = {}  # by thread
            for event in values["traceEvents"]:
                if event["ph"] == "X":
                    events.setdefault(event["tid"], []).append(_parse_event(event))
                elif event["name"] == "thread_name":
                    places[event["tid"]] = event["args"]
            rows = (
                RankTrace(place["rank"], place["replica"], place["stage"], tuple(events.get(thread, ())))
                for thread, place in places.items()
            )
            return cls(int(values["otherData"]["step"]), tuple(rows))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{source} is not a trace of a step ({error}); train again to write one") from None

    def _events(self) -> Iterator[dict[str, Any]]:
        yield _metadata("process_name", 0, {"name": f"step {self.step}"})
        for row in self.ranks:
            thread = row.rank + 1
            place = {"name": str(row), "rank": row.rank, "replica": row.replica, "stage": row.stage}
            yield _metadata("thread_name", thread, place)
            yield _metadata("thread_sort_index", thread, {"sort_index": row.rank})
            for event in row.events:
                action = event.action
                yield {
                    "ph": "X",
                    "name": str(event),
                    "cat": event.category,
                    "pid": _PROCESS_ID,
                    "tid": thread,
                    "ts": round(event.start * 1e6, 3),
                    "dur": round((event.stop - event.start) * 1e6, 3),
                    "args": {} if action is None else {"micro_batch": action.micro_batch, "chunk": action.chunk},
                }


def _metadata(name: str, thread: int, values: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": _PROCESS_ID, "tid": thread, "args": values}


def _parse_event(event: dict[str, Any]) -> TraceEvent:
    category: Category = event["cat"]
    start = float(event["ts"]) / 1e6
    kind = ACTION_KINDS.get(category)
    action = None if kind is None else Action(kind, event["args"]["micro_batch"], event["args"]["chunk"])
    return TraceEvent(category, start, start + float(event["dur"]) / 1e6, action)
