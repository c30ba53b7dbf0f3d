"""Figures of many ranks: a log line of limited size that still names the slowest rank, and its page in the report."""

import json
import os
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as parse
from torch import Tensor

from helpers.layout_cases import Case, RandomWindows, lstm_model
from helpers.rank_pool import RankPools
from stretto import Layout, TrainConfig, Trainer, World, make_engine
from stretto.launch.rank_environment import free_port
from stretto.mesh.topology import Topology
from stretto.nn import Block, CrossEntropy, Stack, State
from stretto.report.balance import balance_section
from stretto.report.record_reader import read_record
from stretto.train import LoggingConfig, open_sinks
from stretto.train.events import log_line
from stretto.train.rank_monitor import RankMonitor, RankReport
from stretto.train.sinks.sink import iter_scalars
from stretto.train.straggler import StragglerCheck


def make_report(num_ranks: int, slowest: int, ranks_per_node: int = 8) -> RankReport:
    busy = tuple(0.5 + (1.25 if rank == slowest else rank / num_ranks / 10) for rank in range(num_ranks))
    waiting = tuple(2 - seconds for seconds in busy)
    return RankReport(10, 2.0, busy, waiting, tuple(10**9 + rank for rank in range(num_ranks)), ranks_per_node)


@given(st.integers(65, 5000), st.sampled_from([1, 4, 6, 8, 16]), st.data())
def test_a_line_of_many_ranks_is_short_and_names_the_slowest(
    num_ranks: int, ranks_per_node: int, data: st.DataObject
) -> None:
    slowest = data.draw(st.integers(0, num_ranks - 1))
    kind, values = log_line(make_report(num_ranks, slowest, ranks_per_node))
    line = json.loads(json.dumps(values))
    assert kind == "ranks" and len(json.dumps(values)) < 5000
    assert line["slowest_rank"] == slowest and line["slowest_busy"] == 1.75 == max(line["busy_max"])
    size = line["ranks_per_group"]
    assert size % ranks_per_node == 0 and len(line["busy"]) == -(-num_ranks // size) <= 64
    group = slowest // size
    assert line["busy_max"].index(1.75) == group
    figures = zip(line["busy_min"], line["busy"], line["busy_max"], strict=True)
    assert all(low <= middle <= high for low, middle, high in figures)


def test_a_line_of_few_ranks_has_every_rank() -> None:
    kind, values = log_line(make_report(64, 3))
    assert kind == "ranks" and list(values) == ["step", "seconds", "busy", "waiting", "memory"]
    assert len(values["busy"]) == 64  # type: ignore[arg-type]


def test_the_report_shows_groups_of_ranks_and_the_slowest_rank(tmp_path: Path) -> None:
    pages = {}
    for num_ranks in (4096, 72, 70, 65, 48):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        lines = [{"kind": "ranks", **dict(log_line(make_report(num_ranks, 17))[1])} for _ in range(2)]
        (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        pages[num_ranks] = str(balance_section(read_record(folder)))
    assert "The mean step on 4,096 ranks took" in pages[4096] and "the mean of 64 ranks" in pages[4096]
    assert "rank 17 was busiest with 1.75 s" in pages[4096]
    assert "ranks 64 to 71" in pages[72]
    assert "ranks 64 to 69" in pages[70] and ">rank 64<" in pages[65]
    assert "Rank 17 was busiest" in pages[48] and "mean of" not in pages[48]


def test_a_rank_that_stays_slow_is_a_straggler_and_one_that_was_slow_once_is_not() -> None:
    check = StragglerCheck(Topology(num_replicas=4, num_stages=2))
    even = [1.0, 5.0] * 4  # the second stage has more to do, which is not a rank's fault
    slow = [seconds + (0.9 if rank == 5 else 0.0) for rank, seconds in enumerate(even)]
    times = [even, slow, even, slow, slow, slow, even, slow, even, even, even, slow]
    stragglers = [check.add(10 * number + 1, 6.0, busy, range(8)) for number, busy in enumerate(times)]
    assert [None if found is None else (found.rank, found.since) for found in stragglers] == [
        None, None, None, None, None, (5, 31), (5, 31), (5, 31), (5, 31), (5, 31), None, None,
    ]  # fmt: skip
    # What counts is the part of a step that it costs: 15 %.
    for min_percent, is_found in ((14.0, True), (16.0, False)):
        check = StragglerCheck(Topology(num_replicas=4, num_stages=2), min_percent)
        assert [check.add(step, 6.0, slow, range(8)) is not None for step in range(3)] == [False, False, is_found]
    few = StragglerCheck(Topology(num_replicas=2, num_stages=1))
    assert not any(few.add(step, 1.0, [0.5, 1.0], [0.0, 0.0]) for step in range(9))


def test_a_rank_of_a_slow_node_is_named_whichever_of_its_ranks_is_the_slowest() -> None:
    check = StragglerCheck(Topology(num_replicas=6, num_stages=1))
    times = [[1.0, 1.0, 1.0, 1.0, 1.5 + 0.1 * (number % 2), 1.55] for number in range(3)]
    stragglers = [check.add(70 + number, 1.6, busy, range(6)) for number, busy in enumerate(times)]
    assert stragglers[:2] == [None, None]
    assert stragglers[2] is not None and (stragglers[2].rank, stragglers[2].since) == (5, 70)


def test_a_slow_node_is_told_from_a_slow_rank(tmp_path: Path) -> None:
    even = [1.0] * 16
    block, cyclic = [7.0 + rank // 4 for rank in range(16)], [7.0 + rank % 4 for rank in range(16)]
    cases = [
        ({8, 9, 10}, block, True), ({8, 9}, block, False), ({9, 13}, block, False), ({8, 9, 10}, cyclic, False),
        ({1, 9, 13}, cyclic, True), ({1, 9, 13}, block, False),
        ({3}, [1.0] * 3 + [2.0] + [1.0] * 12, False),
    ]  # fmt: skip
    for slow, nodes, whole_node in cases:
        check = StragglerCheck(Topology(num_replicas=16, num_stages=1))
        busy = [seconds + (0.5 if rank in slow else 0.0) for rank, seconds in enumerate(even)]
        straggler = [check.add(step, 1.5, busy, nodes) for step in (1, 2, 3)][-1]
        assert straggler is not None and straggler.rank in slow and straggler.whole_node == whole_node
        fields = replace(make_report(16, 3), straggler=straggler).log_fields()
        (tmp_path / "log.jsonl").write_text(json.dumps({"kind": "ranks", **fields}) + "\n")
        page = str(balance_section(read_record(tmp_path)))
        assert ("Most ranks of its node were slow too." in page) == whole_node and "was a straggler" in page


class PausesOnOneRank(Block):
    """Takes its time on rank 1."""

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        time.sleep(0.4 if os.environ.get("RANK") == "1" else 0.0)
        return x, state


def train_with_a_slow_rank(world: World) -> list[Mapping[str, Any]]:
    case = Case(num_rows=9, num_steps=4)
    model = Stack([*lstm_model(), PausesOnOneRank()]).to(case.dtype)
    engine = make_engine(model, CrossEntropy(), Layout(replicas=3), world, seed=3)
    trainer = Trainer(engine, RandomWindows(case), TrainConfig(steps=case.num_steps))
    monitor = RankMonitor(engine)
    lines: list[Mapping[str, Any]] = []
    for report in trainer:
        monitor.add(report)
        ranks = monitor.gather()
        if ranks is not None:
            events = [event for event in (ranks, monitor.new_straggler(ranks)) if event is not None]
            lines += [{"kind": kind, **fields} for kind, fields in map(log_line, events)]
    return lines


def test_a_rank_that_is_slowed_down_on_purpose_is_named_in_log_and_report(pools: RankPools, tmp_path: Path) -> None:
    lines = pools[3].run(train_with_a_slow_rank)[0]
    # Its event comes once, in the third report: whoever replaces ranks learns which.
    assert [line["kind"] for line in lines] == ["ranks", "ranks", "ranks", "straggler", "ranks"]
    assert (lines[3]["rank"], lines[3]["since"], lines[3]["step"]) == (1, 1, 3) and 10 < lines[3]["percent"] < 100
    straggler = lines[-1]["straggler"]
    assert (straggler["rank"], straggler["since"]) == (1, 1) and 0.32 < straggler["seconds"] < 2
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = str(balance_section(read_record(tmp_path)))
    assert "From step 1 to step 4, rank 1 was a straggler: it took" in page


@given(st.integers(1, 5000), st.sampled_from([1, 6, 8]), st.data())
def test_trackers_get_single_ranks_or_what_is_true_of_all_ranks_but_no_groups(
    num_ranks: int, ranks_per_node: int, data: st.DataObject
) -> None:
    report = make_report(num_ranks, data.draw(st.integers(0, num_ranks - 1)), ranks_per_node)
    kind, values = log_line(report)
    scalars = {scalar.tag: scalar.value for scalar in iter_scalars(kind, json.loads(json.dumps(values)))}
    for name, figures in (("busy", report.busy), ("waiting", report.waiting), ("memory", report.memory)):
        of_name = {tag.split("/")[2]: value for tag, value in scalars.items() if tag.startswith(f"ranks/{name}/")}
        if num_ranks <= 64:
            assert of_name == {str(rank): figure for rank, figure in enumerate(figures)}
        else:
            assert of_name == pytest.approx({"min": min(figures), "mean": fmean(figures), "max": max(figures)})
    assert not any(tag.startswith(("ranks/busy_", "ranks/over_ranks")) for tag in scalars)
    assert scalars["ranks/seconds"] == 2.0


def test_prometheus_has_no_groups_as_ranks(tmp_path: Path) -> None:
    port = free_port()
    with open_sinks(LoggingConfig(prometheus_port=port), tmp_path) as sinks:
        sinks.write(*log_line(make_report(4096, 17)))
        until, text = time.monotonic() + 10, ""
        while "stretto_ranks_slowest_rank " not in text and time.monotonic() < until:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
    labels = {sample.labels["rank"] for family in parse(text) for sample in family.samples if sample.labels}
    assert labels == {"min", "mean", "max"} and 'stretto_ranks_busy{rank="max"} 1.75' in text
