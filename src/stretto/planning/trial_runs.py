"""try_layouts: takes some training steps in each of several layouts, in turns, to find out which is fastest.

    round 1   A A A A   B B B B   C C C C
    round 2   C C C C   B B B B   A A A A
    round 3   A A A A   B B B B             C was much slower, so it has left

A machine's speed drifts within seconds. In turns, the drift hits all layouts alike.
"""

import copy
import gc
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

import torch

from stretto.base.errors import ConfigError, DivergedError, PlanError, StrettoError
from stretto.base.freed_memory import release_freed_memory
from stretto.base.reason import class_and_reason
from stretto.base.units import pluralize
from stretto.config.layout import Layout
from stretto.config.train import TrainConfig
from stretto.engine.build import make_engine
from stretto.measure.profile import Progress
from stretto.measure.profile_input import ProfileInput
from stretto.measure.timing import median_bounds, median_ratio, synchronized_time
from stretto.mesh.world import World
from stretto.plan.trial import Finalist, Trial, dump_trials, parse_trials
from stretto.train.trainer import Trainer

_NUM_WARM_UP_STEPS = 2
_NUM_ROUNDS = 20
# After so many rounds, layouts that are slower than the fastest by more than this factor are dropped. In a replay of
# 102 recorded rounds, those after 4, 8 and 14 always chose a layout within 1.03 of the fastest; after 2, 5 and 10, in
# 98 % of cases.
_CUTS = {2: 1.5, 4: 1.2, 8: 1.1, 14: 1.05}
# A turn of the slowest layout takes about this many seconds, and every turn has the same number of steps.
_TURN_SECONDS, _MAX_TURN_STEPS = 0.5, 40
# Layouts are tried in turns if all of them together need at most this fraction of a rank's memory.
_MEMORY_FRACTION = 0.7
# The loop ends long before so many steps. In such a warm-up, the learning rate is about 0: weights stay as they are.
_CONFIG = TrainConfig(steps=10**9, warmup=10**9)


def try_layouts(
    profile_input: ProfileInput,
    world: World,
    finalists: Sequence[Finalist],
    progress: Progress = lambda activity, fraction: None,
    turn_steps: int | None = None,
) -> tuple[Trial, ...]:
    """Measure steps of the layouts on real windows; return a trial for each finalist, the same on every rank.

    Every rank of `world` must call this. A layout may need fewer ranks: the first ones run it, the others wait. Each
    layout trains a copy of the model, with weights from the seed, on windows from the first on: `turn_steps` per turn,
    by default as `num_turn_steps` says. A layout of one rank that runs out of memory gets a note in place of a time. In
    one of several ranks, others may wait for the rank that fails. So it raises `PlanError`, which must end its process:
    then the others raise the same.
    """
    runs = {finalist.layout: _TrialRun(profile_input, world, finalist) for finalist in finalists}
    num_threads, turn_steps = torch.get_num_threads(), turn_steps or num_turn_steps(finalists)
    memory_limit = _MEMORY_FRACTION * profile_input.memory_per_rank(world.local_size)
    # The ranks of a layout must have created equally many groups, also after one that failed on some of them.
    ordered = sorted(runs.values(), key=lambda run: -run.layout.num_ranks)
    needs_more = sum(finalist.memory for finalist in finalists) > memory_limit
    fits_together = not world.all_reduce([float(needs_more)])[0]
    try:
        with _keep_random_state(world.device):
            for index, group in enumerate([ordered] if fits_together else [[run] for run in ordered]):
                progress(f"trying {pluralize(len(finalists), 'layout')}", index / len(finalists))
                _take_turns(group, turn_steps)
                for run in group:
                    run.release()
    finally:
        torch.set_num_threads(num_threads)
    progress("tried", 1.0)
    trials = tuple(runs[finalist.layout].trial() for finalist in finalists)
    # The times that count are the same on all ranks, but not how long it took to build an engine.
    return parse_trials(world.broadcast_text(dump_trials(trials)))


def num_turn_steps(finalists: Sequence[Finalist]) -> int:
    """Return how many steps a turn has. Layouts that are compared must have equally many, on the same windows."""
    slowest = max(finalist.predicted for finalist in finalists)
    return round(min(max(_TURN_SECONDS / max(slowest, 1e-9), 1), _MAX_TURN_STEPS))


def _keep_random_state(device: torch.device) -> AbstractContextManager[None]:
    """Return a context after which torch's global generators are as before; reading data may draw from them."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _take_turns(runs: Sequence["_TrialRun"], turn_steps: int) -> None:
    """Measure some runs in turns, each round in the opposite order. All ranks take the same decisions."""
    remaining = [run for run in runs if run.start()]
    for index in range(_NUM_ROUNDS):
        if index in _CUTS and remaining:
            _compare(remaining)
            limit = _CUTS[index] * min(run.seconds_per_step for run in remaining)
            remaining = [run for run in remaining if run.seconds_per_step <= limit]
        if len(remaining) <= 1 and index >= (min(_CUTS) if len(runs) > 1 else max(_CUTS)):
            break  # there is nothing left to compare with
        for run in remaining[:: 1 if index % 2 == 0 else -1]:
            if not run.take_turn(turn_steps):
                remaining.remove(run)
    _compare(runs)
    _find_bounds(runs)


def _compare(runs: Sequence["_TrialRun"]) -> None:
    """Set the time of a step in each run: its median, relative to the run with the most turns, times that run's mean.

    The turns of a round have the same windows, and the machine has about the same speed. So runs are compared within
    rounds, and one that has left is not judged by shorter windows than the others.
    """
    pace = max(runs, key=lambda run: len(run.times)).times
    for run in runs:
        if run.times:
            run.seconds_per_step = median_ratio(run.times, pace[: len(run.times)]) * statistics.mean(pace)


def _find_bounds(runs: Sequence["_TrialRun"]) -> None:
    """Set the least time that a step of each run may take, in view of how much its turns vary.

    Runs that did not take turns with others get none: the machine's speed may have changed from one to the next.
    """
    measured = [run for run in runs if run.times and not run.has_failed]
    if len(measured) < 2:
        return
    fastest = min(measured, key=lambda run: run.seconds_per_step)
    for run in measured:
        ratios = [own / other for own, other in zip(run.times, fastest.times, strict=False)]  # one may have left
        run.least_seconds = median_bounds(ratios)[0] * fastest.seconds_per_step


class _TrialRun:
    """The steps of one layout on this rank. If the layout has fewer ranks than the world, others only wait."""

    def __init__(self, profile_input: ProfileInput, world: World, finalist: Finalist) -> None:
        self.layout: Layout = finalist.layout
        self.times: list[float] = []  # seconds per step, one for each turn
        self.seconds_per_step = math.nan  # set by `_compare`
        self.least_seconds: float | None = None  # set by `_find_bounds`
        self._profile_input, self._world, self._finalist = profile_input, world, finalist
        self._is_member = world.rank < finalist.layout.num_ranks
        self._trainer: Trainer | None = None
        self._num_steps, self._total_seconds = 0, 0.0
        self._note = ""

    @property
    def has_failed(self) -> bool:
        """Whether the layout could not be built or run, on this rank or another."""
        return bool(self._note)

    def start(self) -> bool:
        """Build the engine and take the first steps, which are slower; return whether that worked on every rank."""
        started = synchronized_time(self._world.device)
        # These errors are about the layout, and are raised before ranks wait for one another.
        with self._note_failure(ConfigError, PlanError):
            if self._is_member:
                self._trainer = self._make_trainer()
        self._equalize_groups()
        is_working = self._is_working()
        if is_working:
            with self._note_failure():
                self._take_steps(_NUM_WARM_UP_STEPS)
            is_working = self._is_working()
        self._total_seconds = synchronized_time(self._world.device) - started
        return is_working

    def take_turn(self, num_steps: int) -> bool:
        """Take some steps, and record how long each of them took: the mean, on the slowest rank.

        Return whether that worked on every rank.
        """
        self._world.barrier()
        started = synchronized_time(self._world.device)
        with self._note_failure():
            self._take_steps(num_steps)
        seconds = synchronized_time(self._world.device) - started if self._is_member else 0.0
        # Members end together, so the mean of their times is that of the slowest.
        seconds = self._world.all_reduce([seconds])[0] / self.layout.num_ranks
        self.times.append(seconds / num_steps)
        self._total_seconds += seconds
        return self._is_working()

    def release(self) -> None:
        """Free the memory of the run."""
        self._trainer = None
        gc.collect()
        release_freed_memory(self._world.device)

    def trial(self) -> Trial:
        """Return the result."""
        return Trial(
            layout=self.layout,
            predicted=self._finalist.predicted,
            measured=None if self.has_failed else self.seconds_per_step,
            at_least=self.least_seconds,
            steps=self._num_steps,
            seconds=self._total_seconds,
            note=self._note,
        )

    @contextmanager
    def _note_failure(self, *noted: type[StrettoError]) -> Iterator[None]:
        """Note `noted` errors, and that a layout of one rank is out of memory; raise what must end all ranks."""
        try:
            yield
        except noted as error:
            self._note = str(error)
        except StrettoError:
            raise
        except Exception as error:
            # On a CPU, torch raises a plain RuntimeError.
            is_memory_error = isinstance(error, (torch.OutOfMemoryError, MemoryError))
            is_memory_error = is_memory_error or "can't allocate memory" in str(error)
            if self.layout.num_ranks > 1:
                failure = "ran out of memory" if is_memory_error else f"failed ({class_and_reason(error)})"
                raise PlanError(
                    f"the trial of {self.layout.name} {failure} on rank {self._world.rank}, for which other "
                    "ranks wait; set the layout yourself, use a smaller batch, or leave trials out with "
                    "run.try_layouts=0 (in Python, try_finalists=0)"
                ) from error
            if not is_memory_error:
                raise
            self._note = "out of memory"

    def _is_working(self) -> bool:
        """Return whether no rank has noted a failure; if one has, free the memory of the run."""
        (num_failed,) = self._world.all_reduce([float(self.has_failed)])
        if num_failed:
            # Rank 0 reports the trials, and may not be the rank that failed.
            self._note = self._note or "another rank can't build it"
            self.release()
        return not num_failed

    def _equalize_groups(self) -> None:
        """Create as many groups on the ranks that only wait as the layout has on its own."""
        is_part = 1 < self.layout.num_ranks < self._world.size
        num_groups = 0 if self._trainer is None else self._trainer.engine.mesh.num_groups + is_part
        # Rank 0 runs every layout.
        (num_groups_of_rank_zero,) = self._world.all_reduce([float(num_groups if self._world.is_rank_zero else 0)])
        if not self._is_member:
            self._world.add_own_groups(int(num_groups_of_rank_zero))

    def _make_trainer(self) -> Trainer:
        profile_input = self._profile_input
        # The engine draws weights in place, and the caller's model may be in use.
        model, loss = copy.deepcopy((profile_input.model, profile_input.loss))
        world = self._world.first_ranks(self.layout.num_ranks)
        engine = make_engine(
            model, loss, self.layout, world, seed=profile_input.seed, precision=profile_input.precision
        )
        optimizer = profile_input.make_optimizer
        return Trainer(engine, profile_input.windows, _CONFIG, optimizer=optimizer, seed=profile_input.seed)

    def _take_steps(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._trainer is None:  # this rank only waits
            return
        self._profile_input.set_threads(min(self.layout.num_ranks, self._world.local_size))
        for _ in range(num_steps):
            # Raised on all ranks alike; a trial only measures time, so the loss need not be finite.
            with suppress(DivergedError):
                self._trainer.advance()
        self._trainer.engine.mesh.world.barrier()
