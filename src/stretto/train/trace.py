"""Tracing: what all ranks did in the last recorded step, brought together on the first."""

import logging
import platform
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from stretto.base.disk import write_atomic
from stretto.base.run_folder import RunFolder
from stretto.plan.actions import Action
from stretto.plan.trace import ACTION_KINDS, CATEGORIES, RankTrace, Trace, TraceEvent
from stretto.train.trainer import Trainer

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NUMBERS_PER_EVENT = 5  # numbers that tell of one work
# Replicas do the same; of thousands of ranks a trace would be larger than anyone can look at, or a viewer open.
_MAX_RANKS = 64

_log = logging.getLogger(__name__)


def gather_trace(trainer: Trainer) -> Trace | None:
    """Return the last step that was recorded, on the first rank; all ranks call it after the same step.

    Set `trainer.is_recording` before a step to record it. Of more than 64 ranks only as many whole replicas tell of it
    as have so many, and at least one.
    """
    mesh, events = trainer.engine.mesh, trainer.recorded_events
    # All ranks leave the barrier at about the same moment, by which the clocks of different machines are aligned.
    mesh.world.barrier()
    told = [time.perf_counter(), _clock(), mesh.replica, mesh.stage, *_pack(events)]
    is_telling = mesh.replica < max(1, _MAX_RANKS // mesh.num_stages)
    found = mesh.world.gather([float(value) for value in told] if is_telling else [])
    return None if found is None else Trace.of(trainer.step, _align(found))


def save_trace(trace: Trace, folder: RunFolder) -> None:
    """Write a trace into a run's folder."""
    path = folder.trace
    try:
        write_atomic(path, trace.to_json().encode())
    except OSError as error:
        # A picture less is no reason to end a run.
        _log.warning("%s can't be written (%s); the run goes on", path, error.strerror)


def _align(told: Sequence[Sequence[float]]) -> list[RankTrace]:
    """Return what ranks have told, each on the clock of the first rank's machine; some tell nothing."""
    met: dict[float, float] = {}
    there = {rank: of_rank for rank, of_rank in enumerate(told) if of_rank}
    for moment, clock, *_ in there.values():
        # Who shares a clock needs no setting of it: the first to leave the sum speaks for its machine.
        met[clock] = min(moment, met.get(clock, moment))
    first = met[told[0][1]]
    return [
        RankTrace(rank, int(replica), int(stage), tuple(work.shifted(first - met[clock]) for work in _unpack(numbers)))
        for rank, (_, clock, replica, stage, *numbers) in there.items()
    ]


def _pack(events: Sequence[TraceEvent]) -> Iterator[float]:
    for work in events:
        part = (0, 0) if work.action is None else (work.action.micro_batch, work.action.chunk)
        yield from (CATEGORIES.index(work.category), *part, work.start, work.stop)


def _unpack(numbers: Sequence[float]) -> Iterator[TraceEvent]:
    for index in range(0, len(numbers), _NUMBERS_PER_EVENT):
        category, micro_batch, chunk, start, stop = numbers[index : index + _NUMBERS_PER_EVENT]
        name = CATEGORIES[int(category)]
        kind = ACTION_KINDS.get(name)
        yield TraceEvent(name, start, stop, None if kind is None else Action(kind, int(micro_batch), int(chunk)))


def _clock() -> float:
    """A number for the clock of this machine: the same for all processes that share it, and hardly for others."""
    try:
        name = _BOOT_ID.read_text(encoding="ascii")
    except OSError:
        name = platform.node()
    return float(zlib.crc32(name.encode()))
