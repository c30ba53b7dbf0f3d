"""Tuner: finds the fastest layout of each region by timing candidates on the first training steps themselves.

All candidates compute the same, so a step is never wasted. A step is timed from the end of one optimizer step to the
end of the next. In each step at most one region tries a candidate; others have what was decided, or are local. Calls
of about the same number of time steps share a decision, so batches of different lengths tune once per bucket.

A trial has two rounds of stretches of steps. The first step of a stretch is not timed:

    round 1   local local local | 2 x 4 ... | 2 x 8 ... | 2 x 16 ...         every candidate
    round 2   2 x 8 ...  | local ... | local ... | 2 x 8 ...      the fastest and local again, back and forth

The ranks of a group see the same calls, so they are at the same place of the same trial. At the end of a round they
exchange their medians; the slowest rank counts.
"""

import time
import weakref
from collections.abc import Sequence
from statistics import median_low
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from stretto.base.errors import ConfigError
from stretto.parallel.groups import Group, say, whole_group
from stretto.parallel.guard import Call
from stretto.parallel.layers import CallRows, Inputs, Layers
from stretto.parallel.layout import LOCAL, Layout, Layouts, candidates, fit
from stretto.parallel.region import Region
from stretto.parallel.rows import Packing

_WARM_UP = 2  # steps of the first trial: DistributedDataParallel makes its buckets anew in the second one
_FIRST_ROUND, _SECOND_ROUND = 3, 6  # steps of a stretch
_NEAR, _FINALISTS = 1.15, 3  # candidates within 15 % of the fastest run again, at most so many
_WORTH = 0.97  # of local's time: what a region has to reach
_QUIET_CALLS = 50  # after which a region that was always best alone needs no messages any more
_MARKS = 100  # that a clock keeps
_CALLS_WITHOUT_STEP = 1000  # after which nobody expects an optimizer


class Tuner:
    """The choice `layout="auto"`, for all regions of a module."""

    def __init__(self) -> None:
        self._clock = _Clock()
        self._trials: dict[tuple[Region, int], _Trial] = {}
        self._step = 0  # the present one: how many optimizer steps are behind it
        self._subject: _Trial | None = None  # what is tried in this step
        self._quiet_calls: dict[Region, int] = {}

    def layouts(self, region: Region) -> Layouts:
        return {
            steps: trial.decision for (each, steps), trial in self._trials.items() if each is region and trial.decision
        }

    def checksum(self, region: Region) -> int:
        return 0

    def progress(self) -> tuple[int, int]:
        return self._clock.num_steps, self._clock.num_timed_steps

    def bind(self, region: Region) -> Group | None:
        if torch.are_deterministic_algorithms_enabled():
            raise ConfigError(
                'layout="auto" chooses by time, and layouts differ in their last bits; with '
                "torch.use_deterministic_algorithms give a Layout, or the stretto.parallel.layouts of another run"
            )
        self._trials = {key: trial for key, trial in self._trials.items() if key[0] is not region}
        group = whole_group(region.mesh)
        counts = rank_counts(group, region)
        if not counts:
            say(f"{region.name}: local, since its work can't be divided among {len(group.ranks)} ranks of a node")
            return None
        for count in counts:
            group.messages(count)
        say(f"{region.name}: tries layouts on {len(group.ranks)} ranks in the first training steps")
        return group

    def choose(self, region: Region, layers: Layers, inputs: Inputs, group: Group, calls: Sequence[Call]) -> Layout:
        self._clock.start(inputs.device)
        # A checkpoint computes a call again in the backward: it gets the same layout again.
        if calls[0].optimizer_steps != self._step and torch._C._current_graph_task_id() == -1:
            self._end_step(calls[0].optimizer_steps)
        longest = max(call.longest for call in calls)
        bucket = 1 << max(longest.bit_length() - 1, 0)  # the power of two below
        if (region, bucket) not in self._trials:
            tried = candidates(rank_counts(group, region), bucket, is_bidirectional=region.is_bidirectional)
            self._trials[region, bucket] = _Trial(tried, _WARM_UP * (not self._trials))
        trial = self._trials[region, bucket]
        if trial.decision is None and self._subject is None:
            self._subject = trial
            if trial.is_round_over and all(call.timed_steps > trial.last_step for call in calls):
                seconds = group.guard.gather(trial.medians(self._clock), calls[group.rank])
                trial.end_round([max(each) for each in zip(*seconds, strict=True)])
                if trial.summary:
                    say(f"{region.name}: {trial.summary} ({bucket} to {2 * bucket - 1} time steps)")
            while not trial.is_tried_out:
                works = try_out(region, layers, inputs, trial.candidate, group, calls)
                trial.note_try_out(all(each == [1] for each in group.guard.gather([int(works)], calls[group.rank])))
        if trial is self._subject:
            trial.work += sum(call.num_steps for call in calls)
        self._end_messages_of(region, calls)
        return fit({1: trial.decision or (trial.candidate if trial is self._subject else LOCAL)}, longest)

    def _end_step(self, next_step: int) -> None:
        if self._subject is not None:
            self._subject.end_step(self._step)
        self._step, self._subject = next_step, None
        for trial in self._trials.values():
            trial.read(self._clock)

    def _end_messages_of(self, region: Region, calls: Sequence[Call]) -> None:
        """Make a region local for good if it is better alone whatever its calls, or if nothing can be timed."""
        trials = [trial for (each, _), trial in self._trials.items() if each is region]
        is_quiet = all(trial.decision == LOCAL for trial in trials)
        self._quiet_calls[region] = self._quiet_calls.get(region, 0) + 1 if is_quiet else 0
        if self._quiet_calls[region] == _QUIET_CALLS:
            region.is_local = True
            say(f"{region.name}: local from now on")
        elif calls[0].optimizer_steps == 0 and calls[0].number == _CALLS_WITHOUT_STEP:
            region.is_local = True
            say(f"{region.name}: local from now on, since no torch.optim.Optimizer took a step to be timed")


class _Trial:
    """The candidates of a region for calls of about the same number of time steps, and their times on this rank."""

    def __init__(self, candidates: Sequence[Layout], num_warm_up_steps: int) -> None:
        self.decision: Layout | None = None if len(candidates) > 1 else LOCAL
        self.work = 0  # time steps of rows in this step, of all ranks
        self.last_step = -1  # that was timed
        self._candidates = list(candidates)
        self._plan = [(LOCAL, False)] * num_warm_up_steps + _stretches(candidates, _FIRST_ROUND)
        self._done = 0  # steps of the plan
        self._num_steps = 0
        self.summary = ""
        self._is_final = False
        self._pending: list[tuple[int, Layout, int]] = []  # step, candidate, work
        self._seconds: dict[Layout, list[float]] = {candidate: [] for candidate in candidates}  # by work
        self._works = {LOCAL}

    @property
    def candidate(self) -> Layout:
        return self._plan[min(self._done, len(self._plan) - 1)][0]

    @property
    def is_round_over(self) -> bool:
        return self._done >= len(self._plan)

    @property
    def is_tried_out(self) -> bool:
        return self.candidate in self._works

    def note_try_out(self, works: bool) -> None:
        candidate = self.candidate
        if works:
            self._works.add(candidate)
            return
        self._plan = [step for step in self._plan if step[0] != candidate]
        self._candidates.remove(candidate)

    def end_step(self, step: int) -> None:
        """Note the step that has ended."""
        if not self.is_round_over and self._plan[self._done][1]:
            self._pending.append((step, self.candidate, self.work))
            self.last_step = step
        self._done, self._num_steps, self.work = self._done + 1, self._num_steps + 1, 0

    def read(self, clock: "_Clock") -> None:
        """Read the times that are known by now."""
        while self._pending and self._pending[0][0] < clock.num_timed_steps:
            step, candidate, work = self._pending.pop(0)
            seconds = clock.seconds(step)
            self._seconds[candidate] += [seconds / max(work, 1)] if seconds is not None else []

    def medians(self, clock: "_Clock") -> list[int]:
        """Return the median time of each candidate on this rank, by work, as integers that are not small."""
        self.read(clock)
        return [round(median_low(self._seconds[each] or [1.0]) * 1e15) for each in self._candidates]

    def end_round(self, times: Sequence[int]) -> None:
        """Go on with the times of the slowest rank: decide, or let the fastest candidates run again."""
        time_of = dict(zip(self._candidates, times, strict=True))
        ranked = sorted(self._candidates, key=time_of.__getitem__)
        near = [candidate for candidate in ranked if time_of[candidate] <= _NEAR * time_of[ranked[0]]][:_FINALISTS]
        if near != [LOCAL] and not self._is_final:
            # Local ran first, when memory and caches were cold: it runs again in any case, and only round 2 counts.
            self._candidates, self._is_final = near + [LOCAL] * (LOCAL not in near), True
            self._seconds = {candidate: [] for candidate in self._candidates}
            self._plan, self._done = _stretches([*self._candidates, *reversed(self._candidates)], _SECOND_ROUND), 0
            return
        best = next((candidate for candidate in ranked if candidate != LOCAL), LOCAL)
        self.decision = best if time_of[best] <= _WORTH * time_of[LOCAL] else LOCAL
        gain = f"{time_of[LOCAL] / time_of[best]:.2f} times as fast as DDP"
        choice = f"{best}, {gain}" if self.decision == best else f"local, as DDP; {best} is {gain}"
        self.summary = f"{choice}, chosen after {self._num_steps} steps"


def _stretches(candidates: Sequence[Layout], num_steps: int) -> list[tuple[Layout, bool]]:
    """Return candidate and whether it is timed, for each step."""
    return [(candidate, index > 0) for candidate in candidates for index in range(num_steps)]


def rank_counts(group: Group, region: Region) -> list[int]:
    """Return by how many ranks of a group a region can be shared."""
    most = len(group.ranks) if region.is_bidirectional else region.num_layers
    return [count for count in range(2, most + 1) if len(group.ranks) % count == 0]


def try_out(
    region: Region, layers: Layers, inputs: Inputs, layout: Layout, group: Group, all_calls: Sequence[Call]
) -> bool:
    """Compute a part of what this rank would, without messages; return whether it works, and all fits in memory."""
    members = group.members(region.num_ranks(layout))
    calls, count = all_calls[members.start : members.stop], layout.spans if region.is_bidirectional else layout.chunks
    num_rows, num_times = sum(call.num_rows for call in calls), -(-max(call.longest for call in calls) // count)
    share = 1.0 if region.is_bidirectional else count / len(members)  # how much of the work is a rank's
    try:
        kept = _kept_memory(layers, inputs, num_rows, num_times) * share
        kept_alone = _kept_memory(layers, inputs, len(inputs.lengths), inputs.longest)
    except RuntimeError:  # of cuDNN, or out of memory
        return False
    # Local steps have run: their peak is within the memory that there is.
    return inputs.device.type != "cuda" or kept <= kept_alone + _free_memory(inputs.device)


def _kept_memory(layers: Layers, inputs: Inputs, num_rows: int, num_times: int) -> int:
    """Run all layers over zeros, forward and backward; return the bytes on a GPU that are kept between them."""
    device, packing = inputs.device, Packing([torch.full((num_rows,), num_times)])
    if not num_rows * num_times:
        return 0

    def same(tensor: Tensor) -> Tensor:
        return tensor

    # With hooks of our own for saved tensors, those around us (of torch.utils.checkpoint) see none.
    with torch.autograd.graph.saved_tensors_hooks(same, same):
        between, states = layers.forms(inputs)
        with torch.no_grad():
            places = [[getattr(*place) for place in layer] for layer in layers.parameters]
            weights = [layers.prepare(index, each, inputs.dtype) for index, each in enumerate(places)]
        for weight in (weight for layer in weights for weight in layer):
            weight.requires_grad_()
        steps = torch.zeros(num_rows * num_times, *between[0].shape, dtype=between[0].dtype, device=device)
        state = [
            torch.zeros(num_rows, *form.shape, dtype=form.dtype, device=device) for each in states for form in each
        ]
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        steps.requires_grad_(steps.is_floating_point())
        y, _ = layers.run(weights, CallRows(packing=packing, seeds=[]), steps, state)
        kept = torch.cuda.memory_allocated(device) - before if device.type == "cuda" else 0
        y.sum().backward()  # type: ignore[no-untyped-call]
    return kept


def _free_memory(device: torch.device) -> int:
    """Return how much more than the peak so far fits on a GPU."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)


class _Clock:
    """Notes when optimizer steps end: on the host, or on a GPU by events, which are read after they have passed."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._num_timed = 0
        self._marks: dict[int, _Mark] = {}  # of the end of each step
        self._device = torch.device("cpu")
        self._has_started = False
        self._optimizer: weakref.ref[Optimizer] | None = None

    def start(self, device: torch.device) -> None:
        """Listen to the first optimizer that takes a step from now on."""
        if self._has_started:
            return
        self._device, self._has_started = device, True
        clock = weakref.ref(self)

        def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401
            if (listening := clock()) is not None:
                listening._note(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(note).remove)

    def _note(self, optimizer: Optimizer) -> None:
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return
        self.num_steps += 1
        self._marks.pop(self.num_steps - _MARKS, None)
        self._marks[self.num_steps] = _Mark(self._device)

    @property
    def num_timed_steps(self) -> int:
        """The number of steps whose time is known."""
        self._num_timed = max(self._num_timed, self.num_steps - _MARKS)
        while self._num_timed < self.num_steps and self._marks[self._num_timed + 1].is_past():
            self._num_timed += 1
        return self._num_timed

    def seconds(self, step: int) -> float | None:
        """Return the time of the step after so many; None if that is long ago."""
        start, stop = self._marks.get(step), self._marks.get(step + 1)
        return start.seconds_until(stop) if start and stop else None


class _Mark:
    """A moment: on the host, or on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._time = time.perf_counter()
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def is_past(self) -> bool:
        return self._event is None or bool(self._event.query())

    def seconds_until(self, other: "_Mark") -> float:
        if self._event is None:
            return other._time - self._time
        return float(self._event.elapsed_time(other._event)) / 1000
