"""Trying layouts: the measured times decide, all ranks agree, and nothing of the caller's changes."""

import copy
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.profiles import kind, profile
from helpers.rank_pool import RankPool, RankPools, RanksFailedError
from stretto import Layout, TrainConfig, Trainer, World, make_engine
from stretto.base.optimizer import OptimizerFactory
from stretto.base.state import State
from stretto.blocks.initialize import initialize
from stretto.cli.rank_exit import exit_on_error
from stretto.data import Batches, Corpus, Lanes, from_arrays
from stretto.errors import ConfigError, PlanError
from stretto.measure.profile_input import ProfileInput
from stretto.measure.span_sweeps import find_sweeps
from stretto.nn import (
    LSTM,
    BidirectionalLSTM,
    Block,
    CrossEntropy,
    Embedding,
    Linear,
    Pointwise,
    SquaredError,
    Stack,
)
from stretto.plan import Cluster, advise, find_plan, save_profile
from stretto.plan.advice import describe_trials
from stretto.plan.finalists import choose_by_trials, find_finalists
from stretto.plan.profile import AllReduceCost
from stretto.plan.serialize import plan_to_dict
from stretto.plan.timeline import Timeline
from stretto.plan.trial import Finalist, Trial, save_trials
from stretto.plan.workload import Workload
from stretto.planning import trial_runs
from stretto.planning.choose import choose_layout, choose_on_ranks
from stretto.planning.profiles import profile_path
from stretto.planning.trial_runs import try_layouts
from stretto.planning.trials import try_on_ranks

ALONE = World(0, 1, torch.device("cpu"))
# Sixty-four chunks of one time step cost many times as much as one chunk, on any machine.
SLOW, FAST = Layout(chunks=64, recompute=True, blocks=(4,)), Layout(blocks=(4,))


def input_of(
    corpus: str,
    lanes: int = 8,
    window: int = 64,
    *,
    third: Block | None = None,
    optimizer: OptimizerFactory = torch.optim.SGD,
) -> ProfileInput:
    model = Stack([Embedding(256, 16), LSTM(16, 16), third or LSTM(16, 16), Linear(16, 256)])
    windows = Lanes(Corpus.open(corpus), lanes, window)
    return ProfileInput(model, CrossEntropy(), windows, optimizer, torch.device("cpu"), threads=1)


class Greedy(Block):
    """On one rank, its forward number `call` needs more memory than there is."""

    def __init__(self, call: int, rank: int = 0) -> None:
        super().__init__()
        self.call, self.rank, self.num_calls = call, rank, 0

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        self.num_calls += 1
        if self.num_calls == self.call and os.environ.get("RANK", "0") == str(self.rank):
            torch.empty(2**60)
        return x, state


def finalists_of(*layouts: Layout, seconds: float = 0.1, memory: float = 1e6) -> list[Finalist]:
    return [Finalist(layout=layout, predicted=seconds, memory=memory) for layout in layouts]


@pytest.fixture
def corpus_path(byte_corpus: Corpus) -> str:
    return str(byte_corpus.store.location)


def test_the_measured_times_are_those_of_the_layouts(corpus_path: str) -> None:
    slow, fast = try_layouts(input_of(corpus_path), ALONE, finalists_of(SLOW, FAST, seconds=0.4))
    assert (slow.layout, fast.layout) == (SLOW, FAST)
    assert slow.measured is not None and fast.measured is not None
    assert slow.measured > 3 * fast.measured
    assert slow.steps == fast.steps == 2 + 2, "after two rounds it leaves, and no other is left"


def test_trying_changes_neither_a_training_in_progress_nor_random_numbers_nor_threads(corpus_path: str) -> None:
    def start_training() -> tuple[ProfileInput, Trainer]:
        given = input_of(corpus_path)
        engine = make_engine(given.model, given.loss, FAST, ALONE, seed=3)
        trainer = Trainer(engine, given.windows, TrainConfig(steps=10))
        trainer.advance()
        return given, trainer

    _, undisturbed = start_training()
    profile_input, trainer = start_training()
    position, weights = trainer.position, copy.deepcopy(profile_input.model.state_dict())
    generator, threads = torch.get_rng_state(), torch.get_num_threads()
    try_layouts(profile_input, ALONE, finalists_of(FAST, seconds=0.4))
    after = profile_input.model.state_dict()
    assert weights.keys() == after.keys() and all(torch.equal(weights[name], after[name]) for name in weights)
    assert torch.equal(generator, torch.get_rng_state()) and threads == torch.get_num_threads()
    assert trainer.position == position
    assert [trainer.advance().loss for _ in range(2)] == [undisturbed.advance().loss for _ in range(2)]


@pytest.mark.parametrize("call", [20, 300], ids=["in the warm-up", "in a turn"])
def test_a_layout_of_one_rank_that_runs_out_of_memory_gets_a_note(call: int, corpus_path: str, tmp_path: Path) -> None:
    """FAST has one call per step, and so less than 20 in all; SLOW has 128."""
    finalists, path = finalists_of(SLOW, FAST, seconds=0.4), tmp_path / "trials.json"

    def run(third: Block | None) -> tuple[Trial, ...]:
        return try_on_ranks(input_of(corpus_path, third=third), ALONE, finalists, path, lambda *_: None)

    slow, fast = run(Greedy(call))
    assert slow.measured is None and slow.note == "out of memory"
    assert fast.measured is not None and not fast.note
    # A failure is not cached: the memory may have been taken by another job.
    assert not path.exists() and all(trial.measured for trial in run(None)) and path.exists()


def try_greedy(world: World, corpus: str, layout: Layout, call: int) -> None:
    """Try a layout as the command does: an error ends the process."""
    with exit_on_error(world):
        profile_input = input_of(corpus, window=16, third=Greedy(call, rank=1))
        try_layouts(profile_input, world, finalists_of(layout, seconds=0.4))


@pytest.mark.parametrize(
    ("layout", "call"),
    [(Layout(stages=2, chunks=2, blocks=(2, 2)), 1), (Layout(replicas=2, blocks=(4,)), 4)],
    ids=["in the warm-up", "in a turn"],
)
def test_a_rank_that_runs_out_of_memory_in_a_step_ends_all_ranks_at_once(
    layout: Layout, call: int, corpus_path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RanksFailedError) as failed:
        RankPool(2).run(try_greedy, corpus_path, layout, call, seconds=60)
    assert failed.value.errors == dict.fromkeys(range(2), "ended with code 2")
    assert capfd.readouterr().err.splitlines() == [
        f"stretto: error: the trial of {layout.name} ran out of memory on rank 1, for which other ranks wait; "
        "set the layout yourself, use a smaller batch, or leave trials out with run.try_layouts=0 (in Python, "
        "try_finalists=0)"
    ]


def test_another_failure_of_one_of_several_ranks_names_its_cause(corpus_path: str) -> None:
    (finalist,) = finalists_of(Layout(replicas=2, blocks=(4,)))
    run = trial_runs._TrialRun(input_of(corpus_path), World(1, 2, torch.device("cpu")), finalist)
    with pytest.raises(PlanError, match=r"^the trial of 2 replicas failed \(ValueError: boom\) on rank 1, for which"):  # noqa: SIM117
        with run._note_failure():
            raise ValueError("boom\nand more")


def try_unbuildable(world: World, corpus: str) -> list[Trial]:
    def refuse(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if world.rank == 1:
            raise ConfigError("not these parameters")
        return torch.optim.SGD(parameters)

    finalists = finalists_of(Layout(stages=2, chunks=2, blocks=(2, 2)), FAST, seconds=0.4)
    return list(try_layouts(input_of(corpus, window=16, optimizer=refuse), world, finalists))


@pytest.mark.long
@pytest.mark.short
def test_a_layout_that_one_rank_can_not_build_gets_a_note_on_all(pools: RankPools, corpus_path: str) -> None:
    first, second = pools[2].run(try_unbuildable, corpus_path, seconds=60)
    assert first == second
    assert [trial.note for trial in first] == ["another rank can't build it", ""] and first[1].measured


class Infinite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * math.inf


def test_a_loss_that_is_not_finite_ends_no_trial(corpus_path: str) -> None:
    profile_input = input_of(corpus_path, third=Pointwise(Infinite()))
    (trial,) = try_layouts(profile_input, ALONE, finalists_of(FAST), turn_steps=20)
    assert trial.measured and not trial.note and trial.steps == 2 + 14 * 20, "more than a run may skip in a row"


def test_the_weights_of_a_trial_stay_those_of_the_seed(corpus_path: str) -> None:
    optimizers: list[torch.optim.Optimizer] = []

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizers.append(torch.optim.SGD(parameters, lr=1.0))
        return optimizers[-1]

    profile_input = input_of(corpus_path, optimizer=make_optimizer)
    try_layouts(profile_input, ALONE, finalists_of(FAST, seconds=0.4))
    initial = initialize(copy.deepcopy(profile_input.model), profile_input.seed, torch.device("cpu"))
    (optimizer,) = optimizers
    weights = optimizer.param_groups[0]["params"]
    assert len(weights) == len(list(initial.parameters()))
    assert all(torch.allclose(*pair) for pair in zip(weights, initial.parameters(), strict=True))


def test_a_layout_that_has_left_does_not_win_because_later_windows_are_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.random.default_rng(1).standard_normal((32, 4, 3), np.float32)
    windows = Batches(from_arrays(numbers, numbers[..., :1]), max_rows=4)
    model = Stack([LSTM(3, 4), Linear(4, 1)])
    profile_input = ProfileInput(model, SquaredError(), windows, torch.optim.SGD, torch.device("cpu"), threads=1)
    now, advance = 0.0, Trainer.advance

    def advance_clock(trainer: Trainer) -> object:
        nonlocal now
        # After two steps of warm-up and four rounds, windows are 1.9 times as long.
        now += {1: 1.0, 2: 1.08, 4: 1.25}[trainer.engine.num_micro_batches] * (1.0 if trainer.step < 6 else 1.9)
        return advance(trainer)

    monkeypatch.setattr(Trainer, "advance", advance_clock)
    monkeypatch.setattr(trial_runs, "synchronized_time", lambda _: now)
    layouts = [Layout(micro_batches=count, blocks=(2,)) for count in (1, 2, 4)]
    trials = try_layouts(profile_input, ALONE, finalists_of(*layouts), turn_steps=1)
    assert [trial.steps for trial in trials] == [2 + 14, 2 + 14, 2 + 4]
    # The one that was dropped is slower by the same factor as before.
    mean = (4 * 1.0 + 10 * 1.9) / 14
    assert [trial.measured for trial in trials] == pytest.approx([mean, mean * 1.08, mean * 1.25])


@pytest.mark.parametrize("memory", [1e6, 1e18])
def test_layouts_that_do_not_fit_together_are_tried_one_by_one(
    memory: float, corpus_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []
    take_turns = trial_runs._take_turns

    def count_runs(runs: Sequence[Any], turn_steps: int) -> None:
        groups.append(len(runs))
        take_turns(runs, turn_steps)

    monkeypatch.setattr(trial_runs, "_take_turns", count_runs)
    layouts = FAST, Layout(micro_batches=2, blocks=(4,))
    try_layouts(input_of(corpus_path), ALONE, finalists_of(*layouts, memory=memory), turn_steps=1)
    assert groups == ([2] if memory == 1e6 else [1, 1])


def try_several(world: World, corpus: str) -> str:
    layouts = [
        Layout(blocks=(4,)),
        Layout(stages=2, chunks=2, blocks=(2, 2)),
        Layout(stages=2, chunks=2, interleave=2, blocks=(1, 1, 1, 1)),
        Layout(replicas=3, blocks=(4,)),
    ]
    found = try_layouts(input_of(corpus, window=16), world, finalists_of(*layouts, seconds=0.4))
    assert [trial.layout for trial in found] == layouts and all(trial.measured for trial in found)
    # The ranks still work together, and can create groups.
    make_engine(input_of(corpus).model, CrossEntropy(), Layout(stages=3), world, seed=1)
    assert world.all_reduce([1.0]) == [3.0]
    return str([trial.measured for trial in found])


@pytest.mark.long
@pytest.mark.short
def test_layouts_with_fewer_ranks_run_on_the_first_ones_and_all_ranks_agree(pools: RankPools, corpus_path: str) -> None:
    answers = pools[3].run(try_several, corpus_path)
    assert len(set(answers)) == 1


def try_spans(world: World) -> list[Trial]:
    """Try what a plan proposes for a bidirectional model that has few rows."""
    numbers = np.random.default_rng(1).standard_normal((8, 24, 4), np.float32)
    windows = Batches(from_arrays(numbers, numbers[..., :1]), max_rows=2)
    model = Stack([BidirectionalLSTM(4, 8), BidirectionalLSTM(16, 8), Linear(16, 1)])
    profile_input = ProfileInput(model, SquaredError(), windows, torch.optim.SGD, torch.device("cpu"), threads=1)
    costs = profile([kind(0.1, 0.2), kind(0.1, 0.2), kind(0, 0)]).model_copy(
        update={"look_ahead_blocks": (0, 1), "sweeps": find_sweeps(model)}
    )
    plan = find_plan(costs, profile_input.workload, Cluster(world.size), num_best=20)
    spans = [best for best in plan.best if best.layout.spans > 1]
    assert {best.layout.spans for best in spans} == {2, 3}
    finalists = [Finalist(layout=best.layout, predicted=0.4, memory=best.memory) for best in spans]
    return list(try_layouts(profile_input, world, finalists))


@pytest.mark.long
@pytest.mark.short
def test_spans_that_a_plan_proposes_can_be_tried(pools: RankPools) -> None:
    first, *others = pools[3].run(try_spans)
    assert first and all(trial.measured and not trial.note for trial in first)
    assert all(trials == first for trials in others)


def choose_with_wrong_profile(world: World, corpus: str, cache: str, try_finalists: int) -> tuple[Layout, list[Trial]]:
    """Choose with a profile in which chunks have no overhead and an all-reduce is slow, so many chunks look best."""
    profile_input = input_of(corpus)
    if world.is_rank_zero:
        costs = [kind(0, 0), kind(0.1, 0.2), kind(0.1, 0.2), kind(0, 0)]
        slow_all_reduce = AllReduceCost(ranks=2, latency=0.3, bandwidth=1e12)
        save_profile(profile(costs, all_reduces=(slow_all_reduce,)), profile_path(Path(cache), profile_input))
    world.barrier()
    choice = choose_on_ranks(profile_input, world, Path(cache), try_finalists=try_finalists)
    return choice.layout, list(choice.plan.trials)


@pytest.mark.long
def test_a_layout_that_is_wrongly_predicted_to_be_fastest_loses(
    pools: RankPools, corpus_path: str, tmp_path: Path
) -> None:
    run = partial(pools[2].run, choose_with_wrong_profile, corpus_path, str(tmp_path))
    (predicted, no_trials), _ = run(0)
    assert predicted.stages == 2 and predicted.micro_batches * predicted.chunks >= 64 and not no_trials
    (chosen, trials), (other_chosen, other_trials) = run(3)
    assert chosen == other_chosen and trials == other_trials, "all ranks agree"
    assert chosen.replicas == 2 and {predicted, chosen} <= {trial.layout for trial in trials}
    (path,) = (tmp_path / "trials").iterdir()
    # The next call reads the trials: doctored ones give another choice.
    doctored = [trial.model_copy(update={"measured": 1e-6}) if trial.layout == predicted else trial for trial in trials]
    save_trials(doctored, path)
    assert run(3)[0][0] == predicted
    path.write_text("[{")
    assert run(3)[1][0] == chosen, "damaged, so they are tried again"


def test_finalists_are_those_that_may_be_fastest() -> None:
    costs = profile([kind(0, 0), kind(), kind(), kind(0, 0)])
    plan = find_plan(costs, Workload.of(8, 64), Cluster(2))
    assert find_finalists(plan, 0) == find_finalists(plan, 1) == (), "a single one need not be tried"
    finalists = find_finalists(plan, 10)
    assert finalists[0].layout == plan.chosen.layout
    fastest = min(best.seconds for best in plan.best)
    fast = {one.layout for one in (*plan.best, *plan.variants) if one.seconds <= 1.5 * fastest}
    assert {finalist.layout for finalist in finalists} == fast
    assert not {best.layout for best in plan.best} <= fast, "not the slow ones"


def test_finalists_are_of_different_kinds_where_predictions_are_close() -> None:
    # Four layouts of stages are predicted to be faster than replicas, which are close.
    slow = AllReduceCost(ranks=2, latency=0.25, bandwidth=1e12)
    plan = find_plan(profile([kind(0.1, 0.2, start=0.001)] * 8, all_reduces=(slow,)), Workload.of(8, 16), Cluster(2))
    chosen = plan.chosen.layout
    (replicas,) = [best for best in plan.best if best.layout.replicas == 2]
    assert chosen.is_interleaved and chosen.chunks > 1
    assert sum(one.seconds < replicas.seconds for one in (plan.chosen, *plan.variants)) == 4
    finalists = [finalist.layout for finalist in find_finalists(plan, 5)]
    assert finalists[:2] == [chosen, replicas.layout], "another kind before more of the same"
    # Then the chosen one without interleaving, with 0.5x, and with 1.5x the chunks.
    others = {(layout.stages, layout.is_interleaved, layout.chunks) for layout in finalists[2:]}
    (plain,) = [layout for layout in finalists[2:] if not layout.is_interleaved]
    assert others == {(2, False, plain.chunks), (2, True, chosen.chunks // 2), (2, True, chosen.chunks * 3 // 2)}


def test_finalists_have_different_numbers_of_ranks_where_predictions_are_close() -> None:
    plan = find_plan(profile([kind()] * 4), Workload.of(8, 64), Cluster(4))
    chosen, other, fewer = (
        replace(plan.chosen, layout=Layout(replicas=replicas, stages=stages), seconds=seconds)
        for replicas, stages, seconds in ((2, 4, 1.0), (4, 2, 1.1), (2, 2, 1.2))
    )
    plan = replace(plan, best=(chosen, other, fewer), variants=())
    assert [finalist.layout for finalist in find_finalists(plan, 2)] == [chosen.layout, fewer.layout]


def test_a_variant_that_is_measured_to_be_fastest_is_chosen() -> None:
    plan = find_plan(profile([kind(0.1, 0.2)] * 4), Workload.of(8, 64), Cluster(2), uses_all=True)
    plan = replace(plan, variants=(replace(plan.chosen, layout=plan.chosen.layout.model_copy(update={"chunks": 5})),))
    variant = plan.variants[0].layout
    tried = choose_by_trials(plan, [Trial(layout=variant, predicted=1.0, measured=0.5)])
    assert tried.chosen.layout == variant and tried.best[1:] == plan.best
    slow = [
        Trial(layout=variant, predicted=1.0, measured=0.5),
        Trial(layout=plan.chosen.layout, predicted=1.0, measured=0.4),
    ]
    best = choose_by_trials(plan, slow).best
    assert [one.layout for one in best[:2]] == [plan.chosen.layout, variant], "every layout that was tried is listed"
    assert len(best) == len(plan.best) + 1


def test_of_layouts_that_a_trial_cannot_tell_apart_the_one_on_fewer_devices_is_chosen() -> None:
    plan = find_plan(profile([kind(0.1, 0.2)] * 4), Workload.of(8, 64), Cluster(2))
    two, one = plan.chosen.layout, plan.single_device.layout
    other = plan.chosen.layout.model_copy(update={"chunks": 5})
    plan = replace(plan, variants=(replace(plan.chosen, layout=other),))

    def order(*measured: tuple[Layout, float]) -> list[Layout]:
        trials = [Trial(layout=layout, predicted=1.0, measured=seconds) for layout, seconds in measured]
        return [best.layout for best in choose_by_trials(plan, trials).best][: len(trials)]

    assert order((two, 1.0), (one, 1.019)) == [one, two]
    assert order((two, 1.0), (one, 1.021)) == [two, one]
    assert order((two, 1.01), (other, 1.0)) == [other, two], "of equally many devices, the fastest"

    def choose(measured: float, at_least: float) -> Layout:
        slower = Trial(layout=one, predicted=1.0, measured=measured, at_least=at_least)
        return choose_by_trials(plan, [Trial(layout=two, predicted=1.0, measured=1.0), slower]).chosen.layout

    assert choose(1.09, 0.99) == one, "its turns vary so much that it may be the faster one"
    assert choose(1.09, 1.01) == two
    assert choose(1.11, 0.9) == two, "too slow to be taken for noise"
    tried = choose_by_trials(plan, [Trial(layout=one, predicted=1.0, measured=1.01)])
    tried = choose_by_trials(tried, [*tried.trials, Trial(layout=two, predicted=1.0, measured=1.0)])
    assert "measured to be 1.01 times as fast as one device, a gain smaller than the error of a trial" in advise(tried)


def test_the_advice_says_why_devices_stay_idle_that_seem_to_make_it_faster() -> None:
    plan = find_plan(profile([kind(0.1, 0.2)] * 4), Workload.of(8, 64), Cluster(4))
    two, four = (replace(plan.chosen, layout=Layout(replicas=replicas)) for replicas in (2, 4))
    trials = [Trial(layout=each.layout, predicted=1.0, measured=1.0) for each in (two, plan.single_device, four)]
    trials[1:] = [trials[1].model_copy(update={"measured": 1.5}), trials[2].model_copy(update={"measured": 0.99})]
    tried = choose_by_trials(replace(plan, best=(four, two, plan.single_device), variants=()), trials)
    assert tried.chosen.layout == two.layout
    idle = "; all 4 are measured to be 1.01 times as fast as this, a gain smaller than the error of a trial"
    assert advise(tried).endswith(idle)


def test_the_bound_of_a_trial_says_how_much_its_turns_vary() -> None:
    fastest, steady, noisy = (_run_with(times) for times in ([1.0] * 8, [1.05] * 8, [0.9, 1.2] * 4))
    failed = _run_with([0.1], has_failed=True)
    runs = [fastest, steady, noisy, failed]
    trial_runs._compare(runs)
    trial_runs._find_bounds(runs)
    assert [run.least_seconds for run in runs] == pytest.approx([1.0, 1.05, 0.9, None])
    alone = _run_with([1.0, 1.1])
    trial_runs._find_bounds([alone])
    assert alone.least_seconds is None, "it took no turns with others"


def _run_with(times: list[float], *, has_failed: bool = False) -> Any:  # noqa: ANN401
    run = trial_runs._TrialRun(None, ALONE, Finalist(layout=Layout(), predicted=1.0, memory=0.0))  # type: ignore[arg-type]
    run.times = times
    run._note = "out of memory" if has_failed else ""
    return run


def test_the_advice_says_which_speeds_are_measured_and_which_are_predicted() -> None:
    plan = find_plan(profile([kind(0.1, 0.2)] * 4), Workload.of(8, 64), Cluster(2))
    chosen, one = plan.chosen.layout, plan.single_device.layout
    assert chosen.num_ranks == 2 and f": predicted to be {plan.speed_up(plan.chosen):.2f} times as fast" in advise(plan)
    trials = [Trial(layout=chosen, predicted=1.0, measured=1.0), Trial(layout=one, predicted=1.0, measured=1.25)]
    advice = advise(choose_by_trials(plan, trials))
    assert f"use 2 devices as {chosen.name}: measured to be 1.25 times as fast as one device (62% of linear" in advice
    assert f"; the prediction is {plan.speed_up(plan.chosen):.2f} times, in which " in advice
    # One device was not tried, so there is no measured speed-up.
    assert advise(choose_by_trials(plan, trials[:1])) == advise(plan)


def test_the_fastest_of_the_measured_is_chosen_and_the_advice_says_so() -> None:
    plan = find_plan(profile([kind(0, 0), kind(), kind(), kind(0, 0)]), Workload.of(8, 64), Cluster(2))
    layouts = [best.layout for best in plan.best]
    one = next(layout for layout in layouts if layout.num_ranks == 1)
    several = next(layout for layout in layouts if layout.num_ranks == 2)
    assert plan.chosen.layout == several
    found = [
        Trial(layout=several, predicted=0.01, measured=0.03, steps=14, seconds=1.0),
        Trial(layout=one, predicted=0.02, measured=0.02, steps=14, seconds=2.0),
    ]
    tried = choose_by_trials(plan, found)
    assert tried.chosen.layout == one and len(tried.best) == len(plan.best)
    predicted = f"the prediction is {plan.speed_up(plan.chosen):.2f} times, in which "
    assert f"is measured to be 0.67 times as fast as one device; {predicted}" in advise(tried)
    times = f"{one.name}: 20 ms; {several.name}: 30 ms"
    assert describe_trials(tried) == f"tried 2 layouts (28 steps in 3 s): {times}"
    failed = [trial.model_copy(update={"measured": None, "note": "out of memory"}) for trial in found]
    assert choose_by_trials(plan, failed).best == plan.best, "the prediction decides"
    assert describe_trials(choose_by_trials(plan, failed)).endswith(f"{one.name}: out of memory")
    values = json.loads(json.dumps(plan_to_dict(tried, profile([kind()]), Timeline(1, ()))))
    assert [trial["measured"] for trial in values["trials"]] == [trial.measured for trial in found]


def test_a_negative_number_to_try_is_an_error_of_one_sentence(corpus_path: str) -> None:
    given = input_of(corpus_path)
    with pytest.raises(
        PlanError, match=r"^try_finalists=-1 must be at least 0; 0 chooses by the predicted time alone$"
    ):
        choose_layout(given.model, given.loss, given.windows, world=ALONE, try_finalists=-1)
