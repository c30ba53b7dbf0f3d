"""Forecasts with inputs that are known over the horizon, and with inputs that are constant within a series."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helpers.stores import write_series
from helpers.untrained_model import untrained
from stretto import Run, TrainedModel, load_model
from stretto.cli.main import main
from stretto.config.toml import parse_config
from stretto.data import ForecastTransform, SeriesOptions, prepare_series
from stretto.errors import ConfigError, DataError
from stretto.nn import Rows
from stretto.serve import forecast, predict
from stretto.store.sequences import Channels


def last_outputs(trained: TrainedModel, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
    with torch.no_grad():
        y, _ = trained.stack.eval()(torch.from_numpy(inputs).unsqueeze(1), trained.stack.initial_state(Rows.of(1)))
    return np.asarray(y[-1, 0].numpy())


def write_sales(path: Path, num_days: int = 40, num_future: int = 6) -> None:
    """Two shops: price is known ahead, size is static; the rows at the end have no sales yet."""
    lines = ["shop,day,price,size,sold"]
    for shop in range(2):
        for day in range(num_days + num_future):
            sold = f"{day * 2 + shop}" if day < num_days else ""
            lines.append(f"{shop},{day},{(day * 7) % 5},{10 + shop},{sold}")
    path.write_text("\n".join(lines) + "\n")


SALES = SeriesOptions(by="shop", time="day", known_future=["price"], static=["size"])
ROLES = {"known_future": ["c1"], "static": ["c2"]}


@pytest.mark.parametrize("context", [None, 8])
def test_a_forecast_sees_the_known_values_of_the_horizon(tmp_path: Path, context: int | None) -> None:
    generator = np.random.default_rng(3)
    values = generator.normal(size=(36, 3)).astype(np.float32)
    values[:, 2] = 7
    other = values[:30] + np.float32(1)
    values[30:, 0] = np.nan  # c0 is to be forecast, and c1 is known for 6 more time steps
    sequences = write_series(tmp_path / "data", [[values, other]])
    data: dict[str, Any] = {"horizon": 3, **ROLES}
    data |= {"lanes": 2, "window": 5} if context is None else {"context": context}
    trained = untrained(tmp_path / "data", **data)
    assert trained.data_spec.task.num_inputs == 3 + 3 and trained.data_spec.task.num_outputs == 3
    future = next(forecast(trained, tmp_path / "data", steps=5))
    assert (future.start, future.channels, future.values.shape) == (30, ("c0",), (5, 1))
    transform = ForecastTransform.from_sequences(sequences, 3, known_future=["c1"], static=["c2"])
    series = values.copy()
    for start in (30, 33):
        begin = 0 if context is None else start - context
        x = transform.inputs(series, begin, start)
        scale = (series[start : start + 3, 1] - transform.mean[1]) / transform.std[1]
        np.testing.assert_allclose(x[-1, 3:], scale, rtol=1e-5)
        series[start : start + 3, :1] = transform.to_predictions(last_outputs(trained, x), series[:start])
    np.testing.assert_allclose(future.values, series[30:35, :1], rtol=1e-4)
    with pytest.raises(DataError, match="series 0 has c1 for 6 of the 9 time steps after the last value of c0;"):
        next(forecast(trained, tmp_path / "data", steps=7))
    with pytest.raises(DataError, match="series 1 has c1 for 0 of the 3 time steps"):
        list(forecast(trained, tmp_path / "data"))


@pytest.mark.parametrize("context", [None, 8])
def test_predictions_are_made_where_the_known_future_is_known(tmp_path: Path, context: int | None) -> None:
    values = np.random.default_rng(3).normal(size=(31, 3)).astype(np.float32)
    sequences = write_series(tmp_path / "data", [[values]])
    data: dict[str, Any] = {"horizon": 3, **ROLES}
    data |= {"lanes": 2, "window": 5} if context is None else {"context": context}
    trained = untrained(tmp_path / "data", **data)
    transform = ForecastTransform.from_sequences(sequences, 3, known_future=["c1"], static=["c2"])
    results = list(predict(trained, tmp_path / "data"))
    # In lanes at 2, 5, ..., 26; sliding windows end at 7, 10, ..., 25.
    assert [result["step"] for result in results] == list(range(2 if context is None else 7, 28, 3))
    for result in results:
        stop = result["step"] + 1
        x = transform.inputs(values, 0 if context is None else stop - context, stop)
        expected = transform.to_predictions(last_outputs(trained, x), values[:stop])
        np.testing.assert_allclose(result["forecast"]["c0"], expected[:, 0], rtol=1e-4)


def test_in_lanes_the_last_prediction_is_the_forecast(tmp_path: Path) -> None:
    write_sales(tmp_path / "sales.csv")
    prepare_series(tmp_path / "sales.csv", tmp_path / "data", SALES)
    trained = untrained(tmp_path / "data", lanes=2, window=5, horizon=6)
    write_sales(tmp_path / "next.csv", num_days=44, num_future=14)
    steps = [(result["series"], result["step"]) for result in predict(trained, tmp_path / "next.csv")]
    due = [5, 11, 17, 23, 29, 35, 41, 43]  # and not after the last value that is known
    assert steps == [(series, step) for series in range(2) for step in due]
    futures = list(forecast(trained, tmp_path / "next.csv"))
    last = [result for result in predict(trained, tmp_path / "next.csv") if result["step"] == 43]
    for future, result in zip(futures, last, strict=True):
        np.testing.assert_allclose(result["forecast"]["sold"], future.values[:, 0], rtol=1e-5)


def test_prepared_data_keeps_which_columns_are_known_and_a_file_continues_past_the_targets(tmp_path: Path) -> None:
    write_sales(tmp_path / "sales.csv")
    (store,) = prepare_series(tmp_path / "sales.csv", tmp_path / "data", SALES)
    values = store.fields.values
    assert isinstance(values, Channels) and (values.known_future, values.static) == (("price",), ("size",))
    trained = untrained(tmp_path / "data", context=8, horizon=6)
    assert trained.data_spec.task.num_inputs == 3 + 6
    write_sales(tmp_path / "next.csv", num_days=50)
    first, second = forecast(trained, tmp_path / "next.csv")
    assert (first.start, second.start, first.channels) == (50, 50, ("sold",))
    cheap = (tmp_path / "next.csv").read_text().replace("0,55,0,", "0,55,4,")
    (tmp_path / "cheap.csv").write_text(cheap)
    changed, same = forecast(trained, tmp_path / "cheap.csv")
    assert (changed.values != first.values).any() and (same.values == second.values).all()
    (tmp_path / "short.csv").write_text("\n".join(cheap.splitlines()[:-1]) + "\n")
    with pytest.raises(DataError, match="series 1 has price for 5 of the 6 time steps after the last value of sold"):
        list(forecast(trained, tmp_path / "short.csv"))


def test_the_stack_for_raw_values_scales_the_known_future_too(tmp_path: Path) -> None:
    write_sales(tmp_path / "sales.csv")
    (store,) = prepare_series(tmp_path / "sales.csv", tmp_path / "data", SALES)
    trained = untrained(tmp_path / "data", context=8, horizon=2, masks=True)
    (values,) = store.read(store.step_ranges([(0, 0)]))
    transform = ForecastTransform.from_sequences(store, 2, masks=True)
    price = values[:, [0]]
    raw = torch.from_numpy(np.concatenate([values[:20], price[1:21], price[2:22]], axis=1)).unsqueeze(1)
    with torch.no_grad():
        y, _ = trained.raw_stack.eval()(raw, trained.raw_stack.initial_state(Rows.of(1)))
    expected = last_outputs(trained, transform.inputs(values, 0, 20))
    np.testing.assert_allclose(y[-1, 0].numpy(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"static": ["price"]}, "static=price is both 0 and 1 in the series .0.; leave it out of static"),
        ({"static": ["size"], "known_future": ["size"]}, "known_future and static both name 'size'"),
        ({"known_future": ["cost"]}, "known_future=cost is not a field of"),
        ({"known_future": ["day"]}, "columns=.* includes time=day"),
    ],
)
def test_columns_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    write_sales(tmp_path / "sales.csv")
    with pytest.raises(DataError, match=sentence):
        prepare_series(tmp_path / "sales.csv", tmp_path / "data", SeriesOptions(by="shop", time="day", **options))


def test_a_config_that_names_no_target_or_other_channels_is_refused(tmp_path: Path) -> None:
    write_sales(tmp_path / "sales.csv")
    prepare_series(tmp_path / "sales.csv", tmp_path / "data", SALES)
    with pytest.raises(DataError, match="nothing is left to forecast"):
        untrained(tmp_path / "data", context=8, known_future=["price", "sold"])
    with pytest.raises(DataError, match="'price' is named in more than one of targets, known_future and static"):
        untrained(tmp_path / "data", context=8, targets=["price"])
    with pytest.raises(DataError, match="known_future 'cost' is not a channel"):
        untrained(tmp_path / "data", context=8, known_future=["cost"])
    with pytest.raises(ConfigError, match=r"data\.known_future=\('x',\) has no effect with data\.feed='batches'"):
        untrained(tmp_path / "data", feed="batches", known_future=["x"])


def test_an_empty_list_in_the_config_turns_off_what_the_data_declares(tmp_path: Path) -> None:
    write_sales(tmp_path / "sales.csv")
    prepare_series(tmp_path / "sales.csv", tmp_path / "data", SALES)
    declared = untrained(tmp_path / "data", context=8, horizon=2)
    assert declared.known_future == ("price",) and declared.data_spec.task.num_outputs == 2
    without = untrained(tmp_path / "data", context=8, horizon=2, known_future=[], static="")
    assert without.known_future == () and '"static": []' in without.metadata()["series"]
    # All three channels are inputs and, since no others are, targets too.
    assert (without.data_spec.task.num_inputs, without.data_spec.task.num_outputs) == (3, 6)
    assert next(predict(without, tmp_path / "data"))["forecast"].keys() == {"price", "size", "sold"}


def test_init_writes_a_run_with_known_and_static_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_sales(tmp_path / "sales.csv", num_days=60)
    options = "--yes --by shop --time day --known-future price --static size --horizon 3 --season 0 --context 8"
    assert main(["init", "sales.csv", *options.split()]) == 0
    text = (tmp_path / "run.toml").read_text()
    assert 'known_future = ["price"]' in text and 'static = ["size"]' in text
    assert main(["init", "sales.csv", "--out", "x.toml", "--yes", "--by", "shop", "--static", "cost"]) == 2


@pytest.mark.long
@pytest.mark.short
def test_a_run_learns_a_target_that_depends_only_on_the_known_future(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    price = generator.normal(size=800)
    rows = [f"{day},{value:.5f},{50 - 9 * value:.5f}" for day, value in enumerate(price)]
    (tmp_path / "sales.csv").write_text("day,price,sold\n" + "\n".join(rows) + "\n")
    options = SeriesOptions(time="day", validation_fraction=0.2)
    prepare_series(tmp_path / "sales.csv", tmp_path / "data", options)
    losses = {}
    for name, known in (("blind", []), ("informed", ["price"])):
        data = {
            "train": str(tmp_path / "data/train"), "valid": str(tmp_path / "data/valid"), "targets": ["sold"],
            "context": 4, "horizon": 3, "every_step": True, "budget": 512, "known_future": known,
        }  # fmt: skip
        tree = {"data": data, "model": {"layers": 1, "hidden": 16}, "train": {"steps": 150, "lr": 2e-2}}
        config = parse_config({**tree, "run": {"folder": str(tmp_path / name), "device": "cpu"}})
        for _ in Run(config).events():
            pass
        losses[name] = load_model(tmp_path / name).evaluate(tmp_path / "data/valid").loss
    # Targets are standardized, so the best blind forecast, the mean, has a loss of about 1.
    assert losses["blind"] > 0.7 and losses["informed"] < 0.05
    future = "".join(f"{day},{value},\n" for day, value in ((800, 1.0), (801, -1.0), (802, 0.0)))
    (tmp_path / "next.csv").write_text((tmp_path / "sales.csv").read_text() + future)
    (result,) = forecast(load_model(tmp_path / "informed"), tmp_path / "next.csv")
    assert result.start == 800 and result.values[:, 0] == pytest.approx([41, 59, 50], abs=3)
