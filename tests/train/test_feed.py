"""A run on each kind of data: it trains, and what it leaves can be loaded and scores the same."""

import json
import math
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from helpers.made_up_stores import NoPages, sequences
from helpers.paged_store import write_store
from helpers.stores import write_series, write_tokens
from stretto import Layout, Run, StepReport, StrettoError, TrainConfig, Trainer, load_model, make_engine
from stretto.config.toml import parse_config
from stretto.data import Corpus, DocumentLanes, ForecastTransform, Lanes, Position, TextOptions, prepare_text
from stretto.errors import ConfigError, DataError
from stretto.nn import LSTM, Linear, SquaredError, Stack, initialize
from stretto.store.cache import Cache
from stretto.store.remote import RemotePages
from stretto.train import EvaluationReport
from stretto.train.feed import _needed_bytes, open_feeds


@pytest.fixture
def rows() -> list[list[int]]:
    generator = np.random.default_rng(1)
    return [generator.integers(0, 9, length).tolist() for length in generator.integers(1, 30, 120)]


def config(folder: Path, data: dict[str, object], **sections: dict[str, object]) -> Any:  # noqa: ANN401
    return parse_config(
        {
            "data": {"train": str(folder / "train"), "valid": str(folder / "valid"), **data},
            "model": {"hidden": 6, "layers": 1},
            "train": {"steps": 4},
            "run": {"folder": str(folder / "run")},
            **sections,
        }
    )


def write(folder: Path, kind: str, rows: list[list[int]]) -> None:
    for part, start in (("train", 0), ("valid", 60)):
        own = rows[start : start + 60]
        if kind == "classes":
            write_tokens(folder / part, [own], 9, [[len(row) % 3 for row in own]])
        elif kind == "tokens":
            write_tokens(folder / part, [own], 9)
        else:
            # Both parts in both stores, so that both have one scale.
            series = np.random.default_rng(2).normal(size=(200, 2)).astype(np.float32)
            write_series(folder / part, [[series, series[:50]]])


@pytest.mark.parametrize(
    ("kind", "data", "asks", "says"),
    [
        ("classes", {"budget": 60}, "class_per_row", "60 rows in batches of at most 60 time steps"),
        ("tokens", {"budget": 60}, "next_token", "60 rows in batches of at most 60 time steps"),
        ("tokens", {"feed": "lanes", "lanes": 3, "window": 5}, "next_token", "60 sequences in 3 lanes x window 5"),
        ("values", {"context": 8, "horizon": 2, "budget": 64}, "horizon", "batches of at most 64 time steps"),
        ("values", {"lanes": 2, "window": 10, "targets": ["c1"], "masks": True}, "horizon", "2 lanes x window 10"),
    ],
)
def test_a_loaded_model_has_the_scores_of_its_run(
    kind: str, data: dict[str, object], asks: str, says: str, rows: list[list[int]], tmp_path: Path
) -> None:
    write(tmp_path, kind, rows)
    run = Run(config(tmp_path, data))
    assert says in str(run.trainer.windows)
    *_, last = run.events()
    assert isinstance(last, EvaluationReport)
    trained = load_model(tmp_path / "run")
    assert trained.data_spec == run.data_spec and trained.data_spec.task.targets == asks
    again = trained.evaluate(tmp_path / "valid")
    assert again.loss == pytest.approx(last.evaluation.loss, rel=1e-6)
    assert again.num_targets == last.evaluation.num_targets
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert ("perplexity" in lines[-1]) == (asks == "next_token")


def test_an_epoch_ends_when_every_row_was_seen(rows: list[list[int]], tmp_path: Path) -> None:
    write(tmp_path, "classes", rows)
    run = Run(config(tmp_path, {"budget": 60}, train={"epochs": 3}))
    assert run.trainer.num_steps is None and run.trainer.progress == 0
    reports = [event for event in run.events() if isinstance(event, StepReport)]
    for epoch in (1, 2, 3):
        assert sum(report.num_targets for report in reports if report.epoch == epoch) == 60
    assert run.trainer.progress == 1 and reports[-1].learning_rate < 0.2 * reports[0].learning_rate


@pytest.mark.parametrize(
    ("kind", "data", "sentence"),
    [
        ("classes", {"budget": 10}, r"data\.train=.*: .* has \d+ time steps, more than data\.budget=10; raise"),
        ("values", {"feed": "forecast"}, r"data\.feed='forecast' needs data\.context"),
        ("tokens", {"feed": "forecast"}, r"holds tokens, not channels"),
        ("tokens", {"feed": "forecast", "context": 3}, r"holds tokens, not channels"),
        ("values", {"feed": "batches"}, r"holds channels, not tokens; use data\.feed='lanes' or 'forecast'"),
        ("classes", {"stride": 3}, r"data\.stride=3 has no effect with data\.feed='batches'; leave it out"),
        ("tokens", {"feed": "lanes", "masks": True}, r"data\.masks=True has no effect on data without channels"),
        ("values", {"context": 8, "targets": ["zz"]}, r"target 'zz' is not a channel of .*; choose from c0, c1"),
        ("values", {"context": 300}, r"no series has the 300 \+ 1 time steps"),
        ("tokens", {"feed": "lanes", "lanes": 900}, r"lanes=900 x window=64 needs"),
    ],
)
def test_data_that_does_not_fit_is_refused_by_its_field(
    kind: str, data: dict[str, object], sentence: str, rows: list[list[int]], tmp_path: Path
) -> None:
    write(tmp_path, kind, rows)
    with pytest.raises(StrettoError, match=sentence) as caught:
        Run(config(tmp_path, data))
    assert isinstance(caught.value, DataError | ConfigError) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_validation_data_with_different_labels_is_refused(rows: list[list[int]], tmp_path: Path) -> None:
    write_tokens(tmp_path / "train", [rows], 9, [[0, *[1] * 119]])
    write_tokens(tmp_path / "valid", [rows], 9, [[2, *[1] * 119]])
    with pytest.raises(DataError, match=r"data\.valid=.* differs from data\.train=.* in its labels; prepare it again"):
        Run(config(tmp_path, {"budget": 60}))


def test_more_micro_batches_than_rows_are_refused(rows: list[list[int]], tmp_path: Path) -> None:
    write(tmp_path, "classes", rows)
    with pytest.raises(
        DataError, match=r"layout\.replicas=1 x layout\.micro_batches=61 exceeds the 60 rows of the data"
    ):
        Run(config(tmp_path, {"budget": 60}, layout={"micro_batches": 61}))


@pytest.mark.parametrize("is_corpus", [True, False])
def test_the_cache_has_room_for_the_lanes_of_a_node_and_a_smaller_one_is_refused(
    is_corpus: bool, tmp_path: Path
) -> None:
    if is_corpus:
        (tmp_path / "text").write_text("a" * (24 << 20))
        prepare_text(tmp_path / "text", tmp_path / "store", TextOptions())
    else:
        write_store(tmp_path / "store", num_steps=6_000_000, num_sequences=100_000)
    data = {"train": f"file://{tmp_path / 'store'}", "valid": None, "feed": "lanes", "window": 5}
    stores = []

    def open_with(lanes: int, ranks_per_node: int | None, layout: Layout, **fields: int) -> int:
        changed = config(tmp_path, {**data, "cache": str(tmp_path), "lanes": lanes, **fields}).data
        feed, _ = open_feeds(changed, layout, 1, ranks_per_node=ranks_per_node)
        assert isinstance(feed.windows, Lanes | DocumentLanes)
        store = feed.windows.corpus.store if isinstance(feed.windows, Lanes) else feed.windows.sequences.store
        stores.append(store)
        assert isinstance(store.pages, RemotePages)
        return store.pages._cache.max_bytes

    # Documents have a page of values and one of ends; and a tenth of all pages is evicted at a time.
    pages_per_lane = 1 if is_corpus else 2
    replicas, stages = Layout(replicas=4), Layout(replicas=4, stages=4)
    assert open_with(10, 1, replicas) == 1 << 30, "the default"
    with patch.object(Cache, "max_bytes", 8 << 20):
        for lanes, ranks_per_node, layout, node_lanes in [
            (24, 2, replicas, 12),
            (20, 8, replicas, 20),  # four replicas are all there are
            (40, 4, stages, 10),  # a node has one replica,
            (40, 6, stages, 20),  # or a part of two
            (20, 4, stages.model_copy(update={"adjacent": "replicas"}), 20),
        ]:
            assert open_with(lanes, ranks_per_node, layout) == int(node_lanes * pages_per_lane * (1 << 20) / 0.9)
        num_bytes = sum(file.num_bytes for file in stores[0].files)
        assert open_with(5000, 4, replicas) == int(num_bytes / 0.9), "no more than the whole store"
    assert open_with(16, 2, replicas, cache_bytes=18 << 20) == 18 << 20
    problem = r"data\.cache_bytes=8,388,608 is too small for a node's share of data\.lanes=40"
    with pytest.raises(ConfigError, match=problem):
        open_with(40, 1, replicas, cache_bytes=8 << 20)
    assert open_with(40, None, replicas, cache_bytes=8 << 20) == 8 << 20, "a process that is not a rank of a run"


def test_many_lanes_of_documents_need_only_the_documents_of_a_pool_in_the_cache() -> None:
    stored = sequences(1000, 1000, NoPages())
    stored = replace(stored, store=replace(stored.store, location="s3://bucket/data"))
    # A pool has 256 windows of 64 tokens per lane, each of two bytes. A page per lane would be 10 GB.
    assert 256 * 10_000 * 64 * 2 < _needed_bytes(DocumentLanes(stored, 10_000, 64), Layout(), 1) < 1 << 30


def test_a_batch_without_targets_changes_no_weight_and_the_run_continues(tmp_path: Path) -> None:
    # Rows of one token have no next one; they lie together at the end of a pool.
    rows = [[token % 9 for token in range(length)] for length in [1] * 30 + [7] * 30]
    for part in ("train", "valid"):
        write_tokens(tmp_path / part, [rows], 9)
    run = Run(config(tmp_path, {"budget": 30}, train={"epochs": 2, "weight_decay": 0.1}))
    seen = 0
    before = [parameter.detach().clone() for parameter in run.engine.stack.parameters()]
    for event in run.events():
        if isinstance(event, StepReport):
            weights = [parameter.detach().clone() for parameter in run.engine.stack.parameters()]
            if not event.num_targets:
                assert all(torch.equal(now, then) for now, then in zip(weights, before, strict=True))
                assert math.isnan(event.loss) and event.gradient_norm == 0
                seen += 1
            before = weights
    assert seen >= 2


def test_data_without_targets_is_refused(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=(60, 2)).astype(np.float32)
    values[10:, 1] = np.nan
    for part in ("train", "valid"):
        write_series(tmp_path / part, [[values]])
    data: dict[str, object] = {"context": 12, "horizon": 2, "targets": ["c1"], "budget": 60}
    run = Run(config(tmp_path, data, train={"epochs": 3}))
    with pytest.raises(DataError, match="a whole epoch has no targets"):
        list(run.events())


@pytest.mark.parametrize(
    ("kind", "data"),
    [("tokens", {"feed": "lanes", "lanes": 4, "window": 64}), ("classes", {"budget": 60}), ("corpus", {"window": 64})],
)
def test_small_validation_data_is_padded_with_blank_rows(
    kind: str, data: dict[str, object], rows: list[list[int]], byte_corpus: Corpus, tmp_path: Path
) -> None:
    few = [[1, 2, 3, 4, 5], [6, 7]]
    if kind == "corpus":
        text = tmp_path / "text.txt"
        text.write_text("short enough\n")
        (valid,) = prepare_text(text, tmp_path / "small", TextOptions(vocabulary=byte_corpus.vocabulary))
        places: dict[str, object] = {"train": byte_corpus.location, "valid": valid.location}
    else:
        places = {}
        labels = [len(row) % 3 for row in rows]
        write_tokens(tmp_path / "train", [rows], 9, [labels] if kind == "classes" else ())
        write_tokens(tmp_path / "valid", [few], 9, [[2, 0]] if kind == "classes" else ())
    *_, last = Run(config(tmp_path, {**data, **places}, layout={"micro_batches": 4})).events()
    assert isinstance(last, EvaluationReport)
    assert last.evaluation.num_targets == {"tokens": 5, "classes": 2, "corpus": 12}[kind]


def test_the_workers_of_a_run_end_with_it(rows: list[list[int]], tmp_path: Path) -> None:
    write(tmp_path, "classes", rows)
    run = Run(config(tmp_path, {"budget": 60, "workers": 1}))
    list(run.events())
    assert not multiprocessing.active_children()


def test_the_rest_of_an_epoch_may_have_no_targets(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=(200, 1)).astype(np.float32)
    values[100:] = np.nan
    sequences = write_series(tmp_path / "data", [[values]])
    data = DocumentLanes(sequences, 1, 10, ForecastTransform.from_sequences(sequences))
    stack = initialize(Stack([LSTM(1, 3), Linear(3, 1)]), 1)
    trainer = Trainer(make_engine(stack, SquaredError()), data, TrainConfig(steps=30), start=Position(0, 0, 15))
    num_targets = [report.num_targets for report in trainer]
    assert num_targets[:4] == [0, 0, 0, 0] and max(num_targets) == 10


def test_the_weights_are_saved_before_the_last_evaluation(rows: list[list[int]], tmp_path: Path) -> None:
    write(tmp_path, "classes", rows)
    damaged = bytearray((tmp_path / "valid" / "targets-00000.bin").read_bytes())
    damaged[0] ^= 1
    (tmp_path / "valid" / "targets-00000.bin").write_bytes(damaged)
    with pytest.raises(DataError, match="is damaged between bytes"):
        list(Run(config(tmp_path, {"budget": 60})).events())
    assert load_model(tmp_path / "run").evaluate(tmp_path / "train").num_targets == 60


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"stride": 4}, r"data\.stride=4 needs data\.context"),
        (
            {},
            r"data\.valid=.* has tokens as inputs, but data\.train=.* has channels; use data of the same kind",
        ),
    ],
)
def test_data_of_a_different_kind_is_refused(
    data: dict[str, object], sentence: str, rows: list[list[int]], tmp_path: Path
) -> None:
    write(tmp_path, "values", rows)
    write_tokens(tmp_path / "other", [rows], 9, [[0, *[1] * 119]])
    places: dict[str, object] = {"valid": str(tmp_path / "other"), "lanes": 2, "window": 10}
    with pytest.raises(StrettoError, match=sentence):
        Run(config(tmp_path, {**places, **data}))
