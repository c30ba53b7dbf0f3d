"""Tracing: gathers on the first rank what the ranks did in a recorded step."""

import logging
import time
import zlib
from collections.abc import Iterator, Sequence

from stretto.base.disk import write_atomic
from stretto.base.run_folder import RunFolder
from stretto.mesh.node import boot_id
from stretto.plan.actions import Action
from stretto.plan.trace import ACTION_KINDS, CATEGORIES, RankTrace, Trace, TraceEvent
from stretto.train.trainer import Trainer

_NUMBERS_PER_EVENT = 6  # as `_pack` yields them
# Replicas do the same work, and viewers can't open a trace of thousands of ranks.
_MAX_RANKS = 64

_log = logging.getLogger(__name__)


def gather_trace(trainer: Trainer) -> Trace | None:
    """Return a trace of the last step, on the first rank; None on others. All ranks must call it.

    Set `trainer.is_recording` before that step. With more than 64 ranks the trace holds as many complete replicas as
    fit into 64, and at least one.
    """
    mesh, events = trainer.engine.mesh, trainer.recorded_events
    # All ranks leave the barrier at about the same time, so `_align` can align the clocks of different nodes.
    mesh.world.barrier()
    numbers = [time.perf_counter(), _clock_id(), mesh.replica, mesh.stage + mesh.span, *_pack(events)]
    is_included = mesh.replica < max(1, _MAX_RANKS // mesh.topology.num_columns)
    gathered = mesh.world.gather([float(number) for number in numbers] if is_included else [])
    return None if gathered is None else Trace.of(trainer.step, _align(gathered))


def save_trace(trace: Trace, folder: RunFolder) -> None:
    """Write a trace to a run's folder."""
    path = folder.trace
    try:
        write_atomic(path, trace.to_json().encode())
    except OSError as error:
        # A missing trace is no reason to end a run.
        _log.warning("%s can't be written (%s); the run continues", path, error.strerror)


def _align(gathered: Sequence[Sequence[float]]) -> list[RankTrace]:
    """Return each rank's events, with times on the first rank's clock; leave out ranks that sent nothing."""
    included = {rank: numbers for rank, numbers in enumerate(gathered) if numbers}
    # When the barrier ended, on each clock. The ranks of a node share a clock; the first to leave the barrier counts.
    barrier_end: dict[float, float] = {}
    for seconds, clock, *_ in included.values():
        barrier_end[clock] = min(seconds, barrier_end.get(clock, seconds))
    reference = barrier_end[gathered[0][1]]  # index 1: the first rank's clock
    traces = []
    for rank, (_, clock, replica, stage, *numbers) in included.items():
        events = tuple(event.shifted(reference - barrier_end[clock]) for event in _unpack(numbers))
        traces.append(RankTrace(rank, int(replica), int(stage), events))
    return traces


def _pack(events: Sequence[TraceEvent]) -> Iterator[float]:
    for event in events:
        action = event.action
        numbers = (0, 0, 0) if action is None else (action.micro_batch, action.chunk, action.run)
        yield from (CATEGORIES.index(event.category), *numbers, event.start, event.stop)


def _unpack(numbers: Sequence[float]) -> Iterator[TraceEvent]:
    for index in range(0, len(numbers), _NUMBERS_PER_EVENT):
        category_index, micro_batch, chunk, run, start, stop = numbers[index : index + _NUMBERS_PER_EVENT]
        category = CATEGORIES[int(category_index)]
        kind = ACTION_KINDS.get(category)
        action = None if kind is None else Action(kind, int(micro_batch), int(chunk), int(run))
        yield TraceEvent(category, start, stop, action)


def _clock_id() -> float:
    """Return a number that identifies this node's clock; all processes of the node get the same number."""
    return float(zlib.crc32(boot_id().encode()))
