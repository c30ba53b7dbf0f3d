"""Predictions: each row once, in order, the same bits on any number of ranks, and none asked twice."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.rank_pool import RankPools
from helpers.stores import write_series, write_tokens
from stretto import TrainedModel, World
from stretto.config.toml import parse_config
from stretto.data import Corpus, Forecast, Sequences, prepare_sequences, prepare_series
from stretto.errors import ConfigError, DataError
from stretto.nn import Linear, Rows, Stack, initialize
from stretto.serve import forecast, predict, prediction, write_predictions
from stretto.serve.source import open_source, prepare_source
from stretto.train.build import build_model
from stretto.train.feed import open_feed

MODEL = {"layers": 1, "hidden": 8}


def untrained(location: Path | str, **data: object) -> TrainedModel:
    """A model of some data as a run would have it, its weights drawn by seed."""
    config = parse_config({"data": {"train": str(location), **data}, "model": MODEL, "run": {"device": "cpu"}})
    data_spec = open_feed(config, location, "data.train").data_spec
    return TrainedModel(config, data_spec, initialize(build_model(config, data_spec.task), seed=5))


def outputs(trained: TrainedModel, inputs: torch.Tensor) -> torch.Tensor:
    """What the model gives for one row."""
    with torch.no_grad():
        y, _ = trained.stack.eval()(inputs.unsqueeze(1), trained.stack.initial_state(Rows.of(1)))
    return y[:, 0]


def labeled(folder: Path, num_rows: int, longest: int = 99) -> Sequences:
    dice = np.random.default_rng(1)
    rows = [dice.integers(0, 20, dice.integers(1, longest + 1)).tolist() for _ in range(num_rows)]
    labels = [index % 3 for index in range(num_rows)]
    cut = num_rows // 3
    return write_tokens(folder, [rows[:cut], rows[cut:]], 20, [labels[:cut], labels[cut:]])


def test_each_sequence_gets_the_label_that_it_would_get_alone(tmp_path: Path) -> None:
    sequences = labeled(tmp_path / "data", 40)
    trained = untrained(tmp_path / "data")
    found = list(predict(trained, tmp_path / "data"))
    assert [answer["sequence"] for answer in found] == list(range(40))
    rows = [(shard, number) for shard, size in enumerate(sequences.shard_sizes) for number in range(size)]
    for answer, tokens in zip(found, sequences.read(sequences.step_ranges(rows)), strict=True):
        likely = outputs(trained, torch.from_numpy(tokens.astype(np.int64)))[-1].softmax(0)
        assert answer["label"] == str(int(likely.argmax()))
        assert answer["probability"] == pytest.approx(float(likely.max()), rel=1e-4)
        assert answer["true_label"] == str(answer["sequence"] % 3)


def write_on_ranks(world: World, location: Path, out: Path) -> int:
    return write_predictions(untrained(location), location, out, world)


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


def test_what_was_written_before_it_was_cut_off_is_not_asked_again(tmp_path: Path) -> None:
    labeled(tmp_path / "data", 2011)
    trained = untrained(tmp_path / "data")
    out = tmp_path / "out.jsonl"

    def cut_off(done: int, count: int) -> None:
        assert count > 3
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_predictions(trained, tmp_path / "data", out, on_progress=cut_off)
    left = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out.jsonl.parts").glob("*.jsonl")}
    assert len(left) == 2 and not out.exists()
    seen = []

    def look(done: int, count: int) -> None:
        parts = (tmp_path / "out.jsonl.parts").glob("*.jsonl")
        seen.append({path.name: path.stat().st_mtime_ns for path in parts if path.name in left})

    write_predictions(trained, tmp_path / "data", out, on_progress=look)
    assert all(found == left for found in seen)
    write_predictions(trained, tmp_path / "data", tmp_path / "whole.jsonl")
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_file_that_was_whole_when_it_was_cut_off_is_taken_as_it_is(tmp_path: Path) -> None:
    labeled(tmp_path / "data", 5)
    trained, out = untrained(tmp_path / "data"), tmp_path / "out.jsonl"

    def cut_off(done: int, count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_predictions(trained, tmp_path / "data", out, on_progress=cut_off)
    (tmp_path / "out.jsonl.parts" / "00000000.jsonl").rename(out)
    written = out.stat().st_mtime_ns
    assert write_predictions(trained, tmp_path / "data", out) == 5
    assert out.stat().st_mtime_ns == written and not (tmp_path / "out.jsonl.parts").exists()


def slow_first(world: World) -> tuple[float, int]:
    """Return how long the first rank's work kept this rank, and how often the ranks met meanwhile."""
    meetings = []
    all_reduce = World.all_reduce

    def counting(world: World, values: Sequence[float]) -> list[float]:
        meetings.append(values)
        return all_reduce(world, values)

    started = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "all_reduce", counting)
        prediction._run_on_first_rank(world, lambda: time.sleep(3 * prediction._POLL_SECONDS))
    return time.monotonic() - started, len(meetings)


def test_ranks_that_wait_for_the_first_hear_from_it_again_and_again(pools: RankPools) -> None:
    for seconds, meetings in pools[2].run(slow_first):
        # All go on together, and nobody has waited for as long as the work took without a word.
        assert seconds > 2.9 * prediction._POLL_SECONDS and meetings >= 4


def test_parts_of_another_model_and_a_file_that_is_there_are_refused(tmp_path: Path) -> None:
    labeled(tmp_path / "data", 5)
    out = tmp_path / "out.jsonl"
    trained = untrained(tmp_path / "data")
    write_predictions(trained, tmp_path / "data", out)
    with pytest.raises(ConfigError, match="exists already"):
        write_predictions(trained, tmp_path / "data", out)

    def cut_off(done: int, count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_predictions(trained, tmp_path / "data", tmp_path / "other.jsonl", on_progress=cut_off)
    initialize(trained.stack, seed=6)
    with pytest.raises(ConfigError, match="another model or other data"):
        write_predictions(trained, tmp_path / "data", tmp_path / "other.jsonl")


def test_sequences_of_tokens_are_scored_as_an_evaluation_scores_them(tmp_path: Path) -> None:
    rows = [[1, 2, 3, 4], [5], [6, 7], [8] * 30]
    write_tokens(tmp_path / "data", [rows], 20)
    trained = untrained(tmp_path / "data")
    found = list(predict(trained, tmp_path / "data"))
    assert [answer["tokens"] for answer in found] == [3, 0, 1, 29]
    assert found[1]["loss"] is None
    total = sum(answer["loss"] * answer["tokens"] for answer in found if answer["tokens"])
    evaluation = trained.evaluate(tmp_path / "data")
    assert total / evaluation.tokens == pytest.approx(evaluation.loss, rel=1e-5)


def test_sequences_of_one_token_alone_are_answered_too(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", [[[1]] * 100 + [[2] * 200]], 20)
    found = list(predict(untrained(tmp_path / "data"), tmp_path / "data"))
    assert [answer["tokens"] for answer in found] == [0] * 100 + [199]


def test_a_text_is_scored_stretch_by_stretch_each_token_once(byte_corpus: Corpus) -> None:
    trained = untrained(byte_corpus.location, lanes=2, window=100)
    found = list(predict(trained, byte_corpus.location))
    assert sum(answer["tokens"] for answer in found) == byte_corpus.num_tokens - 1
    second = found[1]
    assert second["start"] == 800 and second["tokens"] == 800
    tokens = torch.from_numpy(byte_corpus.read(800, 1601))
    logits = outputs(trained, tokens[:-1])
    loss = torch.nn.functional.cross_entropy(logits, tokens[1:])
    assert second["loss"] == pytest.approx(float(loss), rel=1e-5)


def series(folder: Path, lengths: list[int]) -> Sequences:
    dice = np.random.default_rng(3)
    made = [(dice.normal(size=(length, 2)) * [3, 10] + [5, -20]).astype(np.float32) for length in lengths]
    return write_series(folder, [made[:1], made[1:]])


@pytest.mark.parametrize("season", [0, 4])
def test_a_forecast_in_real_units_is_the_way_back_from_what_is_asked(tmp_path: Path, season: int) -> None:
    sequences = series(tmp_path / "data", [30, 9])
    asked = Forecast.from_sequences(sequences, 3, season=season, targets=["c1"])
    (values,) = sequences.read(sequences.step_ranges([(0, 0)]))
    for step in (5, 11, 26):
        scaled = asked.targets(values, step, step + 1)[0]
        np.testing.assert_allclose(
            asked.to_predictions(scaled, values[: step + 1]), values[step + 1 : step + 4, 1:], rtol=1e-5
        )


@pytest.mark.parametrize("context", [None, 8])
def test_series_are_forecast_once_a_horizon_with_what_came(tmp_path: Path, context: int | None) -> None:
    sequences = series(tmp_path / "data", [30, 20, 9])
    data: dict[str, Any] = {"horizon": 3, "season": 4}
    data |= {"lanes": 2, "window": 5} if context is None else {"context": context}
    trained = untrained(tmp_path / "data", **data)
    found = list(predict(trained, tmp_path / "data"))
    asked = Forecast.from_sequences(sequences, 3, season=4)
    for answer in found:
        shard, number = (0, 0) if answer["series"] == 0 else (1, answer["series"] - 1)
        (values,) = sequences.read(sequences.step_ranges([(shard, number)]))
        seen = values[: answer["step"] + 1]
        inputs = torch.from_numpy(asked.inputs(seen if context is None else seen[-context:]))
        expected = asked.to_predictions(outputs(trained, inputs)[-1].numpy(), seen)
        for channel in range(2):
            got = [np.nan if value is None else value for value in answer["forecast"][f"c{channel}"]]
            np.testing.assert_allclose(got, expected[:, channel], rtol=1e-4)
            actual = values[answer["step"] + 1 : answer["step"] + 4, channel]
            np.testing.assert_allclose(answer.get("actual", {}).get(f"c{channel}", []), actual, rtol=1e-6)
    # Once a horizon, and where a series ends; a stretch is asked only where all that follows is known.
    assert len(found) == (10 + 7 + 3 if context is None else 7 + 4)


def test_a_future_in_another_order_of_channels_is_the_same(tmp_path: Path) -> None:
    sequences = series(tmp_path / "data", [30, 20])
    trained = untrained(tmp_path / "data", horizon=2, targets=["c1", "c0"], lanes=2, window=5)
    asked = Forecast.from_sequences(sequences, 2, targets=["c1", "c0"])
    future = next(forecast(trained, tmp_path / "data", steps=4))
    assert future.channels == ("c1", "c0")
    (values,) = sequences.read(sequences.step_ranges([(0, 0)]))
    for start in (0, 2):
        ahead = asked.to_predictions(outputs(trained, torch.from_numpy(asked.inputs(values)))[-1].numpy(), values)
        np.testing.assert_allclose(future.values[start : start + 2], ahead, rtol=1e-4)
        values = np.concatenate([values, ahead[:, ::-1]])
    with pytest.raises(DataError, match="named twice"):
        Forecast.from_sequences(sequences, 2, targets=["c0", "c0"])


def test_outputs_that_only_a_loss_can_read_are_refused(tmp_path: Path) -> None:
    series(tmp_path / "data", [30, 20])
    trained = untrained(tmp_path / "data", horizon=2, lanes=2, window=5)
    wide = replace(trained, stack=initialize(Stack([*list(trained.stack)[:-1], Linear(8, 12)]), seed=1))
    with pytest.raises(ConfigError, match=r"gives \[12\] numbers a step, not 4"):
        list(predict(wide, tmp_path / "data"))
    with pytest.raises(ConfigError, match=r"gives \[12\] numbers a step, not 4"):
        list(forecast(wide, tmp_path / "data"))


def test_a_table_of_several_series_is_read_as_the_runs_own_was(tmp_path: Path) -> None:
    rows = "".join(f"{shop},{day},{day + 10 * shop}\n" for shop in range(3) for day in range(30))
    (tmp_path / "sales.csv").write_text(f"shop,day,sold\n{rows}")
    prepare_series(tmp_path / "sales.csv", tmp_path / "data", by="shop", time="day")
    trained = untrained(tmp_path / "data", context=8, horizon=2)
    found = list(forecast(trained, tmp_path / "sales.csv"))
    assert [future.start for future in found] == [30, 30, 30]
    (tmp_path / "renamed.csv").write_text(f"place,day,sold\n{rows}")
    assert len(list(forecast(trained, tmp_path / "renamed.csv", by="place"))) == 3


def test_a_future_of_ten_thousand_steps_takes_no_longer_for_its_seasons(tmp_path: Path) -> None:
    asked = Forecast((0.0,), (1.0,), (0,), horizon=2, season=4)
    values = np.arange(20.0, dtype=np.float32)[:, None]
    long = np.concatenate([np.full((10**6, 1), np.nan, np.float32), values])
    np.testing.assert_array_equal(asked.to_predictions(np.zeros(2), long), asked.to_predictions(np.zeros(2), values))
    # Begun within the season: what is missing is missing.
    np.testing.assert_array_equal(asked.to_predictions(np.zeros(2), values[:3])[:, 0], [np.nan, 0])


@pytest.mark.parametrize("context", [None, 8])
def test_the_future_is_what_is_forecast_at_the_end_and_goes_on_from_itself(tmp_path: Path, context: int | None) -> None:
    sequences = series(tmp_path / "data", [30, 20])
    data: dict[str, Any] = {"horizon": 3} | ({"lanes": 2, "window": 5} if context is None else {"context": context})
    trained = untrained(tmp_path / "data", **data)
    first, second = forecast(trained, tmp_path / "data", steps=7)
    assert (first.series, first.start, second.start, first.values.shape) == (0, 30, 20, (7, 2))
    asked = Forecast.from_sequences(sequences, 3)
    (values,) = sequences.read(sequences.step_ranges([(0, 0)]))
    for start in (0, 3, 6):
        seen = values if context is None else values[-context:]
        ahead = asked.to_predictions(outputs(trained, torch.from_numpy(asked.inputs(seen)))[-1].numpy(), values)
        np.testing.assert_allclose(first.values[start : start + 3], ahead[: 7 - start], rtol=1e-4)
        values = np.concatenate([values, ahead])


def test_a_future_beyond_the_horizon_needs_all_channels(tmp_path: Path) -> None:
    series(tmp_path / "data", [30, 20])
    trained = untrained(tmp_path / "data", horizon=3, targets=["c0"], lanes=2, window=5)
    assert next(forecast(trained, tmp_path / "data")).values.shape == (3, 1)
    with pytest.raises(ConfigError, match=r"steps=4 exceeds the run's data\.horizon=3"):
        list(forecast(trained, tmp_path / "data", steps=4))


def test_a_file_is_read_as_the_runs_own_data_was(tmp_path: Path) -> None:
    records = [{"text": f"it is {word} " * 3, "mood": word} for word in ("good", "bad", "good", "fine")]
    file = tmp_path / "all.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    prepare_sequences(file, tmp_path / "data", label="mood", level="word")
    trained = untrained(tmp_path / "data")
    # Without labels, with a word that the run has not seen, and the training data gone.
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "it is good it is good it is good"}\n{"text": "unheard it is"}\n')
    prepare_source(other, tmp_path / "prepared", trained.data_spec)
    (tmp_path / "data").rename(tmp_path / "gone")
    found = list(predict(trained, tmp_path / "prepared"))
    own = list(predict(trained, tmp_path / "gone"))
    assert list(predict(trained, file)) == own
    assert "true_label" not in found[0] and own[0]["true_label"] == "good"
    assert found[0]["probability"] == pytest.approx(own[0]["probability"], rel=1e-4)
    assert len(found) == 2


def test_series_of_a_file_are_scaled_as_the_runs_own(tmp_path: Path) -> None:
    rows = "".join(f"{hour},{hour * 0.5},{hour % 7}\n" for hour in range(50))
    (tmp_path / "all.csv").write_text(f"hour,a,b\n{rows}")
    prepare_series(tmp_path / "all.csv", tmp_path / "data", time="hour", validation_fraction=0.2)
    trained = untrained(tmp_path / "data" / "train", context=8, horizon=2)
    prepare_source(tmp_path / "all.csv", tmp_path / "prepared", trained.data_spec)
    source = open_source(tmp_path / "prepared", trained.data_spec)
    assert isinstance(source, Sequences)
    assert source.fields.values == Sequences.open(tmp_path / "data" / "train").fields.values
    assert next(forecast(trained, tmp_path / "prepared")).start == 50


def test_data_of_another_kind_is_refused(tmp_path: Path, byte_corpus: Corpus) -> None:
    labeled(tmp_path / "data", 5)
    trained = untrained(tmp_path / "data")
    with pytest.raises(DataError, match="another vocabulary"):
        list(predict(trained, byte_corpus.location))
    with pytest.raises(ConfigError, match="asked for labels, not for values"):
        next(forecast(trained, tmp_path / "data"))
    with pytest.raises(DataError, match="not a file of records"):
        prepare_source(tmp_path / "x.txt", tmp_path / "p", trained.data_spec)
