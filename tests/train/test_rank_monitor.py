"""What a run says of its ranks while it runs, and that saying so changes nothing."""

import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.layout_cases import NUM_TOKENS, Case, RandomWindows, lstm_model
from helpers.rank_pool import RankPools
from helpers.short_params import some_short
from stretto import Layout, Run, StepReport, TrainConfig, Trainer, World, make_engine
from stretto.config.run import RunConfig
from stretto.config.toml import parse_config
from stretto.data import Corpus
from stretto.errors import PreemptedError
from stretto.mesh.device import peak_memory
from stretto.mesh.wait_timer import WaitTimer
from stretto.nn import Block, CrossEntropy, Embedding, Linear, Stack, State, initialize
from stretto.plan import Trace
from stretto.plan.actions import dependencies
from stretto.plan.schedule import stage_schedule
from stretto.plan.trace import TraceEvent
from stretto.testing import LocalEngine
from stretto.train import RankMonitor, RankReport, Request, gather_trace, trace
from stretto.train.trace import _align, _pack

PAUSE = 0.05
PARTS = ("data", "compute", "optimizer")


class Slow(Block):
    """Takes its time, and changes nothing."""

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        time.sleep(PAUSE)
        return x, state


CASE = Case(num_steps=6)


def make_trainer(world: World | None, layout: Layout, case: Case, blocks: list[Block] | None) -> Trainer:
    model = Stack(blocks or lstm_model()).to(case.dtype)
    config = TrainConfig(steps=case.num_steps, lr=case.lr, optimizer="sgd", schedule="constant", clip=case.clip)
    if world is None:
        return Trainer(LocalEngine(initialize(model, 3), CrossEntropy()), RandomWindows(case), config)
    engine = make_engine(model, CrossEntropy(), layout, world, seed=3)
    return Trainer(engine, RandomWindows(case), config)


MonitorResult = tuple[list[StepReport], list[RankReport | None], Trace | None]


def train_and_monitor(
    world: World | None,
    layout: Layout,
    case: Case = CASE,
    blocks: list[Block] | None = None,
    is_watched: bool = True,
) -> MonitorResult:
    """Train, watched or not."""
    trainer = make_trainer(world, layout, case, blocks)
    ranks = RankMonitor(trainer.engine)
    reports, said = [], []
    trainer.is_recording = is_watched
    for report in trainer:
        reports.append(report)
        ranks.add(report)
        if is_watched and report.step % 3 == 0:
            said.append(ranks.gather())
    return reports, said, gather_trace(trainer) if is_watched else None


LAYOUTS = [Layout(replicas=2, stages=2, chunks=4), Layout(stages=3, micro_batches=2, chunks=3)]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_monitoring_changes_no_bit_and_reports_every_rank(pools: RankPools, layout: Layout) -> None:
    plain = pools[layout.num_ranks].run(train_and_monitor, layout, CASE, None, False)
    watched = pools[layout.num_ranks].run(train_and_monitor, layout)
    for (reports, _, _), (others, _, _) in zip(plain, watched, strict=True):
        assert [(r.loss, r.gradient_norm, r.padding) for r in reports] == [
            (r.loss, r.gradient_norm, r.padding) for r in others
        ]
    assert all(said == [None, None] and trace is None for _, said, trace in watched[1:]), "only the first rank is told"
    reports, (_, last), _ = watched[0]
    assert last is not None and last.step == 6
    assert len(last.busy) == len(last.waiting) == len(last.memory) == layout.num_ranks
    own = [sum(report.seconds for report in reports[3:]) / 3 for reports, _, _ in watched]
    for rank, seconds in enumerate(own):
        assert last.busy[rank] + last.waiting[rank] == pytest.approx(seconds)
        assert 0 < last.busy[rank] < seconds, "some of it was spent waiting, and not all"
    assert last.seconds == pytest.approx(sum(own) / len(own))
    assert last.bubble == pytest.approx(sum(last.waiting) / len(own) / last.seconds)
    assert all(memory > 50e6 for memory in last.memory), "torch alone takes more"


@pytest.mark.long
def test_padding_is_that_of_the_global_batch_in_every_layout(pools: RankPools) -> None:
    data = RandomWindows(CASE)
    windows = [data._read(index, False, False) for index in range(6)]
    expected = [1 - float(window.lengths.sum()) / (window.num_steps * 8) for window in windows]
    assert 0 < min(expected) < max(expected)
    alone, _, _ = train_and_monitor(None, Layout())
    assert [report.padding for report in alone] == pytest.approx(expected)
    for layout in (Layout(replicas=2, stages=2, chunks=2), Layout(replicas=3, micro_batches=2)):
        for reports, _, _ in pools[layout.num_ranks].run(train_and_monitor, layout):
            assert [report.padding for report in reports] == pytest.approx(expected)
    full, _, _ = train_and_monitor(None, Layout(), replace(CASE, is_ragged=False))
    assert [report.padding for report in full] == [0.0] * 6


@pytest.mark.long
def test_a_trace_has_every_action_once_and_in_a_legal_order(pools: RankPools) -> None:
    layout = Layout(replicas=2, stages=2, micro_batches=2, chunks=3)
    _, _, trace = pools[4].run(train_and_monitor, layout, replace(CASE, is_ragged=False, window=12))[0]
    assert trace is not None and trace.step == 6
    assert [str(row) for row in trace.ranks] == [
        f"rank {rank} (replica {rank // 2}, stage {rank % 2})" for rank in range(4)
    ]
    for replica in (0, 1):
        rows = [row for row in trace.ranks if row.replica == replica]
        seen = {(row.stage, span.action): span for row in rows for span in row.timed_actions}
        for row in rows:
            taken = [span.action for span in row.timed_actions]
            num_chunks = len({action.chunk for action in taken})
            assert taken == stage_schedule(row.stage, 2, 2, num_chunks)
            assert [work.category for work in (row.events[0], row.events[-1])] == ["data", "optimizer"]
            for work, after in pairwise(row.events):
                assert work.start <= work.stop <= after.start
            for span in row.timed_actions:
                for stage, action in dependencies(span.action, row.stage, 2, num_chunks):
                    before = seen[stage, action]
                    # A sender may still be about it when its message is there: it is its start that comes before.
                    assert (before.stop if stage == row.stage else before.start) <= span.start


def trace_few_ranks(world: World, layout: Layout, most: int) -> tuple[list[int] | None, list[list[float]] | None]:
    """The ranks in a trace that may have fewer than there are; and what ranks give, each another number of values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "_MAX_RANKS", most)
        step_trace = train_and_monitor(world, layout)[2]
    ranks = None if step_trace is None else [row.rank for row in step_trace.ranks if row.events]
    return ranks, world.gather([float(world.rank)] * world.rank)


@pytest.mark.long
@pytest.mark.parametrize(("most", "ranks"), some_short([(3, [0, 1]), (4, [0, 1, 2, 3]), (1, [0, 1])]))
def test_with_many_ranks_only_complete_replicas_are_traced(pools: RankPools, most: int, ranks: list[int]) -> None:
    traced, *others = pools[4].run(trace_few_ranks, Layout(replicas=2, stages=2), most)
    assert traced == (ranks, [[], [1.0], [2.0] * 2, [3.0] * 3]) and others == [(None, None)] * 3


@pytest.mark.parametrize("layout", [Layout(stages=3, blocks=(2, 1, 1)), Layout(replicas=3)], ids=str)
def test_a_slow_rank_is_busy_and_the_others_wait_for_it(pools: RankPools, layout: Layout) -> None:
    _, (_, last), _ = pools[3].run(monitor_slow_rank, layout)[0]
    assert last.busy[1] > PAUSE
    for rank in (0, 2):
        assert last.busy[rank] < last.busy[1] and last.waiting[rank] > max(PAUSE / 2, last.waiting[1])


def monitor_slow_rank(world: World, layout: Layout) -> MonitorResult:
    """With replicas, only the second of them is slow: the others wait as gradients are added up."""
    middle: list[Block] = [Slow()] if world.rank == 1 or layout.stages > 1 else []
    return train_and_monitor(
        world, layout, CASE, [Embedding(NUM_TOKENS, 8), Linear(8, 8), *middle, Linear(8, NUM_TOKENS)]
    )


def test_a_single_rank_never_waits() -> None:
    for world in (None, World(0, 1, torch.device("cpu"))):
        _, said, trace = train_and_monitor(world, Layout())
        assert [report and (report.waiting, report.bubble) for report in said] == [((0.0,), 0.0)] * 2
        assert trace is not None and [work.category for work in trace.ranks[0].events] == [
            "data",
            "forward",
            "backward",
            "optimizer",
        ]
    before = peak_memory(torch.device("cpu"))
    # As much as was ever in use, beside what is in use now.
    held = torch.ones(before, dtype=torch.uint8)
    assert peak_memory(torch.device("cpu")) > before and len(held) == before


def config_for(corpus: Corpus, folder: Path, steps: int) -> RunConfig:
    return parse_config(
        {
            "data": {"train": corpus.location, "lanes": 8, "window": 20},
            "model": {"hidden": 12},
            "train": {"steps": steps, "schedule": "constant"},
            "run": {"folder": folder, "log_every": 5},
        }
    )


def read_log(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def test_a_run_logs_its_ranks_and_leaves_a_trace(byte_corpus: Corpus, tmp_path: Path) -> None:
    def lines(kind: str) -> list[dict[str, Any]]:
        return read_log(tmp_path, kind)

    def traced() -> int:
        return Trace.from_json((tmp_path / "trace.json").read_text()).step

    list(Run(config_for(byte_corpus, tmp_path, steps=7)).events())
    assert [line["step"] for line in lines("ranks")] == [5, 7]
    assert traced() == 7, "the last, as there are less than ten"
    for line in lines("ranks"):
        assert len(line["busy"]) == len(line["waiting"]) == len(line["memory"]) == 1
        first = 0 if line["step"] == 5 else 5
        seconds = [sum(s[f"{part}_seconds"] for part in PARTS) for s in lines("step")[first : line["step"]]]
        assert line["seconds"] == pytest.approx(sum(seconds) / len(seconds))
    assert all(line["padding"] == 0.0 and line["waiting_seconds"] == 0.0 for line in lines("step"))
    list(Run(config_for(byte_corpus, tmp_path, steps=30)).events())
    assert [line["step"] for line in lines("ranks")] == [5, 7, 10, 15, 20, 25, 30]
    assert traced() == 17, "the tenth after this start"


def test_a_preempted_run_reports_its_ranks_first(byte_corpus: Corpus, tmp_path: Path) -> None:
    run = Run(config_for(byte_corpus, tmp_path, steps=30))
    with pytest.raises(PreemptedError):
        for event in run.events():
            if isinstance(event, StepReport) and event.step == 3:
                run.trainer.request(Request.STOP)
    assert [line["step"] for line in read_log(tmp_path, "ranks")] == [4]
    assert Trace.from_json((tmp_path / "trace.json").read_text()).step == 4


def test_a_trace_that_can_not_be_written_does_not_end_the_run(
    byte_corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trace.json").mkdir()
    list(Run(config_for(byte_corpus, tmp_path, steps=2)).events())
    assert (tmp_path / "weights.safetensors").is_file() and not (tmp_path / "trace.json").is_file()
    assert "trace.json can't be written (Is a directory); the run continues" in caplog.text


def test_clocks_of_different_machines_are_aligned() -> None:
    work = TraceEvent("data", 10.0, 11.0)

    def told(shift: float, late: float, clock: float, place: tuple[int, int]) -> list[float]:
        """A rank that did the same at the same time by a clock that shows another, and left a sum at 20, or late."""
        return [20.0 + shift + late, clock, *place, *_pack([work.shifted(shift)])]

    rows = _align([told(0, 0, 7, (0, 0)), told(0, 0.3, 7, (0, 1)), told(500, 0.3, 8, (1, 0)), told(500, 0, 8, (1, 1))])
    assert [row.events for row in rows] == [(work,)] * 4
    assert [(row.rank, row.replica, row.stage) for row in rows] == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_waiting_is_measured_on_the_stream_of_an_accelerator() -> None:
    device = torch.device("cuda")
    wait_timer, large = WaitTimer(device), torch.rand(4096, 4096, device=device)
    for _ in range(2):
        started = wait_timer.begin()
        for _ in range(20):
            large = large @ large / 4096
        wait_timer.end(started)
    began = time.perf_counter()
    torch.accelerator.synchronize()
    assert wait_timer.seconds > time.perf_counter() - began, "most of it was queued"
