"""A trace of one step: what each rank did and when, as Chrome trace events, which Perfetto opens too."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from stretto.base.bounded_read import parse_json
from stretto.base.errors import DataError
from stretto.base.reason import class_and_reason
from stretto.plan.actions import Action, ActionKind
from stretto.plan.timeline import TimedAction, Timeline

Category = Literal[
    "data", "forward", "backward", "optimizer", "head", "head gradient", "embedding", "embedding gradient"
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
ACTION_KINDS: dict[Category, ActionKind] = {
    "forward": ActionKind.FORWARD,
    "backward": ActionKind.BACKWARD,
    "head": ActionKind.HEAD,
    "head gradient": ActionKind.HEAD_GRADIENT,
    "embedding": ActionKind.EMBEDDING,
    "embedding gradient": ActionKind.EMBEDDING_GRADIENT,
}
_KIND_CATEGORIES = {kind: category for category, kind in ACTION_KINDS.items()}
# Not 0, which trace viewers treat as a system process.
_PROCESS_ID = 1


class TraceEvent(NamedTuple):
    """One activity of a rank, with start and stop in seconds."""

    category: Category
    start: float
    stop: float
    action: Action | None = None  # the forward, backward or head; None in other categories

    @classmethod
    def of(cls, timed: TimedAction) -> "TraceEvent":
        """Return the event for a timed action."""
        return cls(_KIND_CATEGORIES[timed.action.kind], timed.start, timed.stop, timed.action)

    def __str__(self) -> str:
        if self.action is None:
            return self.category
        run = f" run {self.action.run}" if self.action.run else ""
        return f"{self.action.kind.value} micro-batch {self.action.micro_batch} chunk {self.action.chunk}{run}"

    def shifted(self, seconds: float) -> "TraceEvent":
        """Return the event `seconds` later."""
        return self._replace(start=self.start + seconds, stop=self.stop + seconds)


@dataclass(frozen=True)
class RankTrace:
    """The events of one rank, and its replica and stage."""

    rank: int
    replica: int
    stage: int
    events: tuple[TraceEvent, ...]

    def __str__(self) -> str:
        return f"rank {self.rank} (replica {self.replica}, stage {self.stage})"

    @property
    def timed_actions(self) -> tuple[TimedAction, ...]:
        """The rank's forwards, backwards and heads."""
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
    def of(cls, step: int, ranks: Sequence[RankTrace]) -> "Trace":
        """Return a trace of ranks that share a clock, shifted so that the first event starts at 0."""
        first = min((event.start for rank in ranks for event in rank.events), default=0.0)
        shifted = (replace(rank, events=tuple(event.shifted(-first) for event in rank.events)) for rank in ranks)
        return cls(step, tuple(sorted(shifted, key=lambda rank: rank.rank)))

    def timeline(self, replica: int = 0) -> Timeline:
        """Return the timeline of one replica; it starts at 0 with the first action."""
        ranks = [rank for rank in self.ranks if rank.replica == replica]
        timed_actions = [timed for rank in ranks for timed in rank.timed_actions]
        first = min((timed.start for timed in timed_actions), default=0.0)
        shifted = [timed._replace(start=timed.start - first, stop=timed.stop - first) for timed in timed_actions]
        return Timeline(len(ranks), tuple(sorted(shifted, key=lambda timed: (timed.start, timed.stage))))

    def to_json(self) -> str:
        """Return the trace as Chrome trace events in JSON, one per line."""
        events = ",\n".join(json.dumps(event) for event in self._events())
        return f'{{"displayTimeUnit": "ms", "otherData": {{"step": {self.step}}}, "traceEvents": [\n{events}\n]}}\n'

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "the trace") -> "Trace":
        """Parse what `to_json` wrote; `source` names the text in errors."""
        try:
            values = parse_json(text)
            events: dict[int, list[TraceEvent]] = {}  # by thread
            thread_args: dict[int, dict[str, int]] = {}  # by thread: rank, replica and stage
            for event in values["traceEvents"]:
                if event["ph"] == "X":
                    events.setdefault(event["tid"], []).append(_parse_event(event))
                elif event["name"] == "thread_name":
                    thread_args[event["tid"]] = event["args"]
            ranks = (
                RankTrace(args["rank"], args["replica"], args["stage"], tuple(events.get(thread, ())))
                for thread, args in thread_args.items()
            )
            return cls(int(values["otherData"]["step"]), tuple(ranks))
        except (ValueError, KeyError, TypeError) as error:
            reason = class_and_reason(error)
            raise DataError(f"{source} is not a trace of a step ({reason}); train again to write one") from None

    def _events(self) -> Iterator[dict[str, Any]]:
        yield _metadata("process_name", 0, {"name": f"step {self.step}"})
        for rank in self.ranks:
            thread = rank.rank + 1  # 0 is for the name of the process
            args = {"name": str(rank), "rank": rank.rank, "replica": rank.replica, "stage": rank.stage}
            yield _metadata("thread_name", thread, args)
            yield _metadata("thread_sort_index", thread, {"sort_index": rank.rank})
            for event in rank.events:
                action = event.action
                yield {
                    "ph": "X",
                    "name": str(event),
                    "cat": event.category,
                    "pid": _PROCESS_ID,
                    "tid": thread,
                    "ts": round(event.start * 1e6, 3),
                    "dur": round((event.stop - event.start) * 1e6, 3),
                    "args": {} if action is None else _action_args(action),
                }


def _metadata(name: str, thread: int, values: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": _PROCESS_ID, "tid": thread, "args": values}


def _action_args(action: Action) -> dict[str, int]:
    run = {"run": action.run} if action.run else {}
    return {"micro_batch": action.micro_batch, "chunk": action.chunk, **run}


def _parse_event(event: dict[str, Any]) -> TraceEvent:
    category: Category = event["cat"]
    start = float(event["ts"]) / 1e6
    kind = ACTION_KINDS.get(category)
    args = event["args"]
    action = None if kind is None else Action(kind, args["micro_batch"], args["chunk"], args.get("run", 0))
    return TraceEvent(category, start, start + float(event["dur"]) / 1e6, action)
