"""Predictions: each row once, in order, bitwise equal on any number of ranks, and resumable."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from helpers.rank_pool import RankPools
from helpers.stores import write_series, write_tokens
from helpers.untrained_model import untrained
from stretto import TrainedModel, World
from stretto.data import (
    Corpus,
    ForecastTransform,
    SequenceOptions,
    Sequences,
    SeriesOptions,
    prepare_sequences,
    prepare_series,
)
from stretto.errors import ConfigError, DataError
from stretto.nn import Linear, Rows, Stack, initialize
from stretto.serve import forecast, predict, prediction, write_predictions
from stretto.serve.prediction_dataset import TextRows
from stretto.serve.source import open_source, prepare_source


def outputs(trained: TrainedModel, inputs: torch.Tensor) -> torch.Tensor:
    """The model's outputs for one row."""
    with torch.no_grad():
        y, _ = trained.stack.eval()(inputs.unsqueeze(1), trained.stack.initial_state(Rows.of(1)))
    return y[:, 0]


def labeled(folder: Path, num_rows: int, longest: int = 99) -> Sequences:
    generator = np.random.default_rng(1)
    rows = [generator.integers(0, 20, generator.integers(1, longest + 1)).tolist() for _ in range(num_rows)]
    labels = [index % 3 for index in range(num_rows)]
    cut = num_rows // 3
    return write_tokens(folder, [rows[:cut], rows[cut:]], 20, [labels[:cut], labels[cut:]])


def test_each_sequence_gets_the_label_that_it_gets_alone(tmp_path: Path) -> None:
    sequences = labeled(tmp_path / "data", 40)
    trained = untrained(tmp_path / "data")
    results = list(predict(trained, tmp_path / "data"))
    assert [row["sequence"] for row in results] == list(range(40))
    rows = [(shard, number) for shard, size in enumerate(sequences.shard_sizes) for number in range(size)]
    for row, tokens in zip(results, sequences.read(sequences.step_ranges(rows)), strict=True):
        probabilities = outputs(trained, torch.from_numpy(tokens.astype(np.int64)))[-1].softmax(0)
        assert row["label"] == str(int(probabilities.argmax()))
        assert row["probability"] == pytest.approx(float(probabilities.max()), rel=1e-4)
        assert row["true_label"] == str(row["sequence"] % 3)


def write_on_ranks(world: World, location: Path, out: Path) -> int:
    return write_predictions(untrained(location), location, out, world)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_predictions_on_several_ranks_equal_those_of_one_in_order(
    pools: RankPools, tmp_path: Path, num_ranks: int
) -> None:
    labeled(tmp_path / "data", 2011)
    alone = tmp_path / "alone.jsonl"
    assert write_predictions(untrained(tmp_path / "data"), tmp_path / "data", alone) == 2011
    assert pools[num_ranks].run(write_on_ranks, tmp_path / "data", tmp_path / "ranks.jsonl") == [2011] * num_ranks
    assert (tmp_path / "ranks.jsonl").read_bytes() == alone.read_bytes()
    assert [json.loads(line)["sequence"] for line in alone.read_text().splitlines()] == list(range(2011))
    assert not list(tmp_path.glob("*.parts"))


def write_from_url(world: World, location: Path, url: str, home: Path) -> int:
    with patch.dict(os.environ, {"HOME": str(home)}):
        return write_predictions(untrained(location), url, home / "ranks.jsonl", world)


def test_only_one_of_several_ranks_downloads_a_file(pools: RankPools, tmp_path: Path) -> None:
    labeled(tmp_path / "data", 300)
    rows = [{"tokens": [row % 20, 3, 5]} for row in range(300)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert write_predictions(untrained(tmp_path / "data"), tmp_path / "rows.jsonl", tmp_path / "alone.jsonl") == 300
    requests = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            requests.append(args[0])

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/rows.jsonl"
        assert pools[2].run(write_from_url, tmp_path / "data", url, tmp_path) == [300, 300]
        server.shutdown()
        thread.join()
    assert (tmp_path / "ranks.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()
    assert len([line for line in requests if str(line).startswith("GET")]) == 1


def test_an_interrupted_call_is_resumed_without_predicting_a_part_again(tmp_path: Path) -> None:
    labeled(tmp_path / "data", 2011)
    trained = untrained(tmp_path / "data")
    out = tmp_path / "out.jsonl"

    def interrupt(done: int, count: int) -> None:
        assert count > 3
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_predictions(trained, tmp_path / "data", out, on_progress=interrupt)
    left = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out.jsonl.parts").glob("*.jsonl")}
    assert len(left) == 2 and not out.exists()
    seen = []

    def look(done: int, count: int) -> None:
        parts = (tmp_path / "out.jsonl.parts").glob("*.jsonl")
        seen.append({path.name: path.stat().st_mtime_ns for path in parts if path.name in left})

    write_predictions(trained, tmp_path / "data", out, on_progress=look)
    assert seen and all(parts == left for parts in seen)
    write_predictions(trained, tmp_path / "data", tmp_path / "whole.jsonl")
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_file_that_was_complete_when_it_was_interrupted_is_kept(tmp_path: Path) -> None:
    labeled(tmp_path / "data", 5)
    trained, out = untrained(tmp_path / "data"), tmp_path / "out.jsonl"

    def interrupt(done: int, count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_predictions(trained, tmp_path / "data", out, on_progress=interrupt)
    (tmp_path / "out.jsonl.parts" / "00000000.jsonl").rename(out)
    written = out.stat().st_mtime_ns
    assert write_predictions(trained, tmp_path / "data", out) == 5
    assert out.stat().st_mtime_ns == written and not (tmp_path / "out.jsonl.parts").exists()


def slow_first(world: World) -> tuple[float, int]:
    """Return how long this rank waited for the work of rank 0, and the number of collectives meanwhile."""
    collectives = []
    all_reduce = World.all_reduce

    def counting(world: World, values: Sequence[float]) -> list[float]:
        collectives.append(values)
        return all_reduce(world, values)

    world.barrier()  # both ranks start the clock together
    started = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "all_reduce", counting)
        prediction._run_on_rank_zero(world, lambda: time.sleep(3 * prediction._POLL_SECONDS))
    return time.monotonic() - started, len(collectives)


@pytest.mark.long
@pytest.mark.short
def test_no_collective_waits_for_all_of_the_work_of_the_first_rank(pools: RankPools) -> None:
    for seconds, num_collectives in pools[2].run(slow_first):
        assert seconds > 2.5 * prediction._POLL_SECONDS and num_collectives >= 4


def test_parts_of_another_model_and_an_existing_file_are_refused(tmp_path: Path) -> None:
    labeled(tmp_path / "data", 5)
    out = tmp_path / "out.jsonl"
    trained = untrained(tmp_path / "data")
    write_predictions(trained, tmp_path / "data", out)
    with pytest.raises(ConfigError, match="already exists"):
        write_predictions(trained, tmp_path / "data", out)

    def interrupt(done: int, count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_predictions(trained, tmp_path / "data", tmp_path / "other.jsonl", on_progress=interrupt)
    initialize(trained.stack, seed=6)
    with pytest.raises(ConfigError, match="results from a different model, data or settings"):
        write_predictions(trained, tmp_path / "data", tmp_path / "other.jsonl")


def test_sequences_of_tokens_are_scored_as_an_evaluation_scores_them(tmp_path: Path) -> None:
    rows = [[1, 2, 3, 4], [5], [6, 7], [8] * 30]
    write_tokens(tmp_path / "data", [rows], 20)
    trained = untrained(tmp_path / "data")
    results = list(predict(trained, tmp_path / "data"))
    assert [row["tokens"] for row in results] == [3, 0, 1, 29]
    assert results[1]["loss"] is None
    total = sum(row["loss"] * row["tokens"] for row in results if row["tokens"])
    evaluation = trained.evaluate(tmp_path / "data")
    assert total / evaluation.num_targets == pytest.approx(evaluation.loss, rel=1e-5)


def test_data_of_any_size_has_at_most_the_maximum_number_of_parts(
    monkeypatch: pytest.MonkeyPatch, byte_corpus: Corpus
) -> None:
    monkeypatch.setattr(prediction, "_PART_STEPS", 1)
    monkeypatch.setattr(prediction, "_MAX_PARTS", 4)
    rows = TextRows(byte_corpus, byte_corpus.num_tokens // 7 + 1)
    parts = prediction._split_into_parts(rows)
    assert len(parts) == 4
    assert [index for part in parts for index in part] == list(range(7))


def test_sequences_of_one_token_have_a_result_too(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", [[[1]] * 100 + [[2] * 200]], 20)
    results = list(predict(untrained(tmp_path / "data"), tmp_path / "data"))
    assert [row["tokens"] for row in results] == [0] * 100 + [199]


def test_a_text_is_scored_piece_by_piece_each_token_once(byte_corpus: Corpus) -> None:
    trained = untrained(byte_corpus.location, lanes=2, window=100)
    results = list(predict(trained, byte_corpus.location))
    assert sum(row["tokens"] for row in results) == byte_corpus.num_tokens - 1
    second = results[1]
    assert second["start"] == 800 and second["tokens"] == 800
    tokens = torch.from_numpy(byte_corpus.read(800, 1601))
    logits = outputs(trained, tokens[:-1])
    loss = torch.nn.functional.cross_entropy(logits, tokens[1:])
    assert second["loss"] == pytest.approx(float(loss), rel=1e-5)


def series(folder: Path, lengths: list[int]) -> Sequences:
    generator = np.random.default_rng(3)
    arrays = [(generator.normal(size=(length, 2)) * [3, 10] + [5, -20]).astype(np.float32) for length in lengths]
    return write_series(folder, [arrays[:1], arrays[1:]])


@pytest.mark.parametrize("season", [0, 4])
def test_to_predictions_is_the_inverse_of_targets(tmp_path: Path, season: int) -> None:
    sequences = series(tmp_path / "data", [30, 9])
    spec = ForecastTransform.from_sequences(sequences, 3, season=season, targets=["c1"])
    (values,) = sequences.read(sequences.step_ranges([(0, 0)]))
    for step in (5, 11, 26):
        scaled = spec.targets(values, step, step + 1)[0]
        np.testing.assert_allclose(
            spec.to_predictions(scaled, values[: step + 1]), values[step + 1 : step + 4, 1:], rtol=1e-5
        )


@pytest.mark.parametrize("context", [None, 8])
def test_series_are_forecast_once_per_horizon_beside_the_actual_values(tmp_path: Path, context: int | None) -> None:
    sequences = series(tmp_path / "data", [30, 20, 9])
    data: dict[str, Any] = {"horizon": 3, "season": 4}
    data |= {"lanes": 2, "window": 5} if context is None else {"context": context}
    trained = untrained(tmp_path / "data", **data)
    results = list(predict(trained, tmp_path / "data"))
    spec = ForecastTransform.from_sequences(sequences, 3, season=4)
    for row in results:
        shard, number = (0, 0) if row["series"] == 0 else (1, row["series"] - 1)
        (values,) = sequences.read(sequences.step_ranges([(shard, number)]))
        seen = values[: row["step"] + 1]
        inputs = torch.from_numpy(spec.inputs(seen if context is None else seen[-context:]))
        expected = spec.to_predictions(outputs(trained, inputs)[-1].numpy(), seen)
        for channel in range(2):
            predicted = [np.nan if value is None else value for value in row["forecast"][f"c{channel}"]]
            np.testing.assert_allclose(predicted, expected[:, channel], rtol=1e-4)
            actual = values[row["step"] + 1 : row["step"] + 4, channel]
            np.testing.assert_allclose(row.get("actual", {}).get(f"c{channel}", []), actual, rtol=1e-6)
    # Once per horizon and at the end of a series; sliding windows only where all values after them are known.
    assert len(results) == (10 + 7 + 3 if context is None else 7 + 4)


def test_a_forecast_follows_the_order_of_its_target_channels(tmp_path: Path) -> None:
    sequences = series(tmp_path / "data", [30, 20])
    trained = untrained(tmp_path / "data", horizon=2, targets=["c1", "c0"], lanes=2, window=5)
    spec = ForecastTransform.from_sequences(sequences, 2, targets=["c1", "c0"])
    future = next(forecast(trained, tmp_path / "data", steps=4))
    assert future.channels == ("c1", "c0")
    (values,) = sequences.read(sequences.step_ranges([(0, 0)]))
    for start in (0, 2):
        ahead = spec.to_predictions(outputs(trained, torch.from_numpy(spec.inputs(values)))[-1].numpy(), values)
        np.testing.assert_allclose(future.values[start : start + 2], ahead, rtol=1e-4)
        values = np.concatenate([values, ahead[:, ::-1]])
    with pytest.raises(DataError, match="listed more than once"):
        ForecastTransform.from_sequences(sequences, 2, targets=["c0", "c0"])


def test_outputs_of_a_custom_loss_are_refused(tmp_path: Path) -> None:
    series(tmp_path / "data", [30, 20])
    trained = untrained(tmp_path / "data", horizon=2, lanes=2, window=5)
    wide = replace(trained, stack=initialize(Stack([*list(trained.stack)[:-1], Linear(8, 12)]), seed=1))
    with pytest.raises(ConfigError, match=r"outputs have shape \[12\] per time step, not \[4\]"):
        list(predict(wide, tmp_path / "data"))
    with pytest.raises(ConfigError, match=r"outputs have shape \[12\] per time step, not \[4\]"):
        list(forecast(wide, tmp_path / "data"))


def test_a_table_of_several_series_is_read_like_the_runs_data(tmp_path: Path) -> None:
    rows = "".join(f"{shop},{day},{day + 10 * shop}\n" for shop in range(3) for day in range(30))
    (tmp_path / "sales.csv").write_text(f"shop,day,sold\n{rows}")
    prepare_series(tmp_path / "sales.csv", tmp_path / "data", SeriesOptions(by="shop", time="day"))
    trained = untrained(tmp_path / "data", context=8, horizon=2)
    results = list(forecast(trained, tmp_path / "sales.csv"))
    assert [future.start for future in results] == [30, 30, 30]
    with pytest.raises(DataError, match=r"of type dict, .*; save a table in memory to a file first, as df\.to_csv"):
        next(forecast(trained, {"sold": [1.0]}))  # type: ignore[arg-type]
    (tmp_path / "renamed.csv").write_text(f"place,day,sold\n{rows}")
    assert len(list(forecast(trained, tmp_path / "renamed.csv", by="place"))) == 3


def test_a_seasonal_forecast_depends_only_on_the_last_season(tmp_path: Path) -> None:
    spec = ForecastTransform((0.0,), (1.0,), (0,), horizon=2, season=4)
    values = np.arange(20.0, dtype=np.float32)[:, None]
    long = np.concatenate([np.full((10**6, 1), np.nan, np.float32), values])
    np.testing.assert_array_equal(spec.to_predictions(np.zeros(2), long), spec.to_predictions(np.zeros(2), values))
    # A series shorter than a season: values before its beginning are missing.
    np.testing.assert_array_equal(spec.to_predictions(np.zeros(2), values[:3])[:, 0], [np.nan, 0])


@pytest.mark.parametrize("context", [None, 8])
def test_a_long_forecast_continues_from_its_own_values(tmp_path: Path, context: int | None) -> None:
    sequences = series(tmp_path / "data", [30, 20])
    data: dict[str, Any] = {"horizon": 3} | ({"lanes": 2, "window": 5} if context is None else {"context": context})
    trained = untrained(tmp_path / "data", **data)
    first, second = forecast(trained, tmp_path / "data", steps=7)
    assert (first.series, first.start, second.start, first.values.shape) == (0, 30, 20, (7, 2))
    spec = ForecastTransform.from_sequences(sequences, 3)
    (values,) = sequences.read(sequences.step_ranges([(0, 0)]))
    for start in (0, 3, 6):
        seen = values if context is None else values[-context:]
        ahead = spec.to_predictions(outputs(trained, torch.from_numpy(spec.inputs(seen)))[-1].numpy(), values)
        np.testing.assert_allclose(first.values[start : start + 3], ahead[: 7 - start], rtol=1e-4)
        values = np.concatenate([values, ahead])


def test_a_forecast_beyond_the_horizon_needs_all_channels(tmp_path: Path) -> None:
    series(tmp_path / "data", [30, 20])
    trained = untrained(tmp_path / "data", horizon=3, targets=["c0"], lanes=2, window=5)
    assert next(forecast(trained, tmp_path / "data")).values.shape == (3, 1)
    with pytest.raises(ConfigError, match=r"steps=4 exceeds the run's data\.horizon=3"):
        list(forecast(trained, tmp_path / "data", steps=4))


def test_a_file_is_read_like_the_runs_data(tmp_path: Path) -> None:
    records = [{"text": f"it is {word} " * 3, "mood": word} for word in ("good", "bad", "good", "fine")]
    file = tmp_path / "all.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    prepare_sequences(file, tmp_path / "data", SequenceOptions(label="mood", level="word"))
    trained = untrained(tmp_path / "data")
    # Without labels, with a word that the run has not seen, and the training data gone.
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "it is good it is good it is good"}\n{"text": "unheard it is"}\n')
    prepare_source(other, tmp_path / "prepared", trained.data_spec)
    (tmp_path / "data").rename(tmp_path / "gone")
    results = list(predict(trained, tmp_path / "prepared"))
    expected = list(predict(trained, tmp_path / "gone"))
    assert list(predict(trained, file)) == expected
    assert "true_label" not in results[0] and expected[0]["true_label"] == "good"
    assert results[0]["probability"] == pytest.approx(expected[0]["probability"], rel=1e-4)
    assert len(results) == 2


def test_series_of_a_file_are_scaled_like_the_runs_data(tmp_path: Path) -> None:
    rows = "".join(f"{hour},{hour * 0.5},{hour % 7}\n" for hour in range(50))
    (tmp_path / "all.csv").write_text(f"hour,a,b\n{rows}")
    prepare_series(tmp_path / "all.csv", tmp_path / "data", SeriesOptions(time="hour", validation_fraction=0.2))
    trained = untrained(tmp_path / "data" / "train", context=8, horizon=2)
    prepare_source(tmp_path / "all.csv", tmp_path / "prepared", trained.data_spec)
    source = open_source(tmp_path / "prepared", trained.data_spec)
    assert isinstance(source, Sequences)
    assert source.fields.values == Sequences.open(tmp_path / "data" / "train").fields.values
    assert next(forecast(trained, tmp_path / "prepared")).start == 50


def test_data_of_another_kind_is_refused(tmp_path: Path, byte_corpus: Corpus) -> None:
    labeled(tmp_path / "data", 5)
    trained = untrained(tmp_path / "data")
    with pytest.raises(DataError, match="differs from the run in its vocabulary"):
        list(predict(trained, byte_corpus.location))
    with pytest.raises(ConfigError, match="predicts class_per_row, not a horizon"):
        next(forecast(trained, tmp_path / "data"))
    with pytest.raises(DataError, match="not a file of records"):
        prepare_source(tmp_path / "x.txt", tmp_path / "p", trained.data_spec)


@pytest.mark.parametrize("is_folder", [True, False])
def test_links_in_a_run_from_someone_else_are_not_followed(is_folder: bool, tmp_path: Path) -> None:
    location = labeled(tmp_path / "data", 9).location
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "letter.txt").write_text("precious")
    parts = tmp_path / "predictions.jsonl.parts"
    if is_folder:
        parts.symlink_to(tmp_path / "private")
    else:
        parts.mkdir()
        (parts / "00000000.jsonl").symlink_to(tmp_path / "private" / "letter.txt")
    with pytest.raises(
        ConfigError, match=r"(parts|00000000\.jsonl) is a symbolic link; delete it, or choose a different"
    ):
        write_predictions(untrained(location), location, tmp_path / "predictions.jsonl")
    assert [path.read_text() for path in (tmp_path / "private").iterdir()] == ["precious"]
    assert not (tmp_path / "predictions.jsonl").exists()
