"""Forecasts of quantiles: columns, order, metrics, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.stores import write_series
from helpers.untrained_model import untrained
from stretto.cli.main import main
from stretto.data import ForecastTransform, Sequences
from stretto.errors import ConfigError
from stretto.nn import QuantileLoss, Rows
from stretto.serve import forecast, predict, write_predictions
from stretto.serve.metrics import compute_metrics
from stretto.serve.naive_scores import find_naive_scores

QUANTILES = (0.05, 0.5, 0.9)
MODEL = {"loss": "quantile", "quantiles": QUANTILES}


def series(folder: Path) -> Sequences:
    generator = np.random.default_rng(3)
    arrays = [(generator.normal(size=(length, 2)) * [3, 10] + [5, -20]).astype(np.float32) for length in (30, 20)]
    return write_series(folder, [arrays[:1], arrays[1:]])


@pytest.mark.parametrize("context", [None, 8])
def test_the_quantiles_of_a_forecast_are_the_sorted_outputs_in_the_units_of_the_series(
    tmp_path: Path, context: int | None
) -> None:
    sequences = series(tmp_path / "data")
    data: dict[str, Any] = {"horizon": 3, "season": 4, "targets": ["c1", "c0"]}
    data |= {"lanes": 2, "window": 5} if context is None else {"context": context}
    trained = untrained(tmp_path / "data", MODEL, **data)
    first = next(forecast(trained, tmp_path / "data", steps=2))
    assert first.values.shape == (2, 2, 3) and first.quantiles == QUANTILES
    assert first.columns == ("c1@0.05", "c1@0.5", "c1@0.9", "c0@0.05", "c0@0.5", "c0@0.9")
    assert first.table.shape == (2, 6) and (np.diff(first.values, axis=-1) >= 0).all()
    (values,) = sequences.read(sequences.step_ranges([(0, 0)]))
    transform = ForecastTransform.from_sequences(sequences, 3, season=4, targets=["c1", "c0"])
    x = torch.from_numpy(transform.inputs(values if context is None else values[-context:])).unsqueeze(1)
    with torch.no_grad():
        y, _ = trained.stack.eval()(x, trained.stack.initial_state(Rows.of(1)))
    outputs = np.sort(y[-1, 0].numpy().reshape(3, 2, 3), axis=-1)
    for quantile in range(3):
        expected = transform.to_predictions(outputs[..., quantile].flatten(), values)
        np.testing.assert_allclose(first.values[..., quantile], expected[:2], rtol=1e-5)
    with pytest.raises(ConfigError, match=r"steps=4 exceeds the run's data\.horizon=3; quantiles are known up to"):
        next(forecast(trained, tmp_path / "data", steps=4))


def test_the_metrics_of_quantiles_are_those_computed_by_hand(tmp_path: Path) -> None:
    series(tmp_path / "data")
    trained = untrained(tmp_path / "data", MODEL, horizon=3, targets=["c1"], lanes=2, window=5)
    results = list(predict(trained, tmp_path / "data"))
    pairs = [
        ([result["forecast"][f"c1@{quantile}"][index] for quantile in QUANTILES], value)
        for result in results
        for index, value in enumerate(result.get("actual", {}).get("c1", []))
    ]
    predicted, actual = (torch.tensor(numbers, dtype=torch.float64) for numbers in zip(*pairs, strict=True))
    write_predictions(trained, tmp_path / "data", tmp_path / "out.jsonl")
    metrics = compute_metrics(tmp_path / "out.jsonl")
    loss = QuantileLoss(QUANTILES)(predicted, actual)
    is_covered = (predicted[:, 0] <= actual) & (actual <= predicted[:, 2])
    assert metrics == pytest.approx(
        {
            "pinball loss of c1": float(loss.total / loss.count),
            "mean absolute error of c1": float((predicted[:, 1] - actual).abs().mean()),
            "coverage of c1, 0.05 to 0.9": float(is_covered.double().mean()),
        }
    )


@pytest.mark.parametrize("scale", ["standard", "none"])
def test_the_metrics_of_evaluations_are_in_the_units_of_the_series(tmp_path: Path, scale: str) -> None:
    sequences = series(tmp_path / "data")
    data = {"horizon": 3, "season": 4, "context": 8, "scale": scale, "valid": str(tmp_path / "data")}
    trained = untrained(tmp_path / "data", MODEL, {"names": ["mae"]}, **data)
    evaluation = trained.evaluate(tmp_path / "data")
    transform = ForecastTransform.from_sequences(sequences, 3, season=4, scale=scale == "standard")
    errors, is_covered = [], []
    for values in sequences.read(sequences.step_ranges([(0, 0), (1, 0)])):
        for stop in range(8, len(values) - 2):
            x = torch.from_numpy(transform.inputs(values[stop - 8 : stop])).unsqueeze(1)
            with torch.no_grad():
                y, _ = trained.stack(x, trained.stack.initial_state(Rows.of(1)))
            actual = values[stop : stop + 3]
            median = transform.to_predictions(y[-1, 0, 1::3].numpy(), values[:stop])
            quantiles = transform.to_quantiles(y[-1, 0].numpy(), values[:stop])
            errors.append(np.abs(median - actual))
            is_covered.append((quantiles[..., 0] <= actual) & (actual <= quantiles[..., 2]))
    assert evaluation.num_targets == np.size(errors) * 3
    assert evaluation.scores == pytest.approx({"mae": np.mean(errors), "coverage": np.mean(is_covered)}, rel=1e-4)
    assert "coverage 0." in str(evaluation)


def test_a_model_that_outputs_zeros_scores_like_the_naive_forecast_of_its_season(tmp_path: Path) -> None:
    series(tmp_path / "data")
    trained = untrained(tmp_path / "data", MODEL, horizon=3, season=4, context=8, valid=str(tmp_path / "data"))
    with torch.no_grad():
        for parameter in trained.stack.parameters():
            parameter.zero_()
    write_predictions(trained, tmp_path / "data", tmp_path / "out.jsonl")
    metrics = compute_metrics(tmp_path / "out.jsonl")
    naive = find_naive_scores(trained, tmp_path / "data")
    assert naive is not None and str(naive).startswith("repeating the last 4 time steps: pinball loss of ")
    assert naive.errors == pytest.approx(
        {name: value for name, value in metrics.items() if "coverage" not in name}, rel=1e-4
    )
    naive = find_naive_scores(trained, tmp_path / "data", stride=1)
    assert naive is not None and naive.loss == pytest.approx(trained.evaluate(tmp_path / "data").loss, rel=1e-4)


def test_a_run_learns_the_quantiles_of_noise_and_the_commands_give_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    noise = np.random.default_rng(1).normal(size=1500)
    rows = "".join(f"{hour},{100 + 10 * value:.4f}\n" for hour, value in enumerate(noise))
    Path("load.csv").write_text(f"hour,load\n{rows}")
    prepare = "prepare series load.csv --out data --time hour --validation-fraction 0.3"
    assert main(prepare.split()) == 0
    data = 'train = "data/train"\nvalid = "data/valid"\ncontext = 4\nhorizon = 2\nbudget = 1024'
    model = 'layers = 1\nhidden = 4\nloss = "quantile"'
    Path("run.toml").write_text(
        f'[data]\n{data}\n[model]\n{model}\n[train]\nsteps = 150\nlr = 3e-2\n[run]\ndevice = "cpu"\nfolder = "run"\n'
    )
    assert main(["train", "run.toml"]) == 0
    capsys.readouterr()
    assert main(["predict", "run"]) == 0
    said = capsys.readouterr().out
    # The 0.1 and 0.9 quantiles of the noise are 1.28 standard deviations from the mean.
    assert float(said.split("coverage of load, 0.1 to 0.9")[1].split()[0]) == pytest.approx(0.8, abs=0.05)
    lines = [json.loads(line)["forecast"] for line in Path("run/predictions.jsonl").read_text().splitlines()]
    means = {name: np.mean([line[name] for line in lines]) for name in ("load@0.1", "load@0.5", "load@0.9")}
    assert means == pytest.approx({"load@0.1": 87.2, "load@0.5": 100, "load@0.9": 112.8}, abs=2.5)
    assert main(["forecast", "run", "--data", "load.csv", "--out", "next.csv"]) == 0
    assert "load@0.1" in capsys.readouterr().out
    lines = Path("next.csv").read_text().splitlines()
    assert lines[0] == "series,step,time,load@0.1,load@0.5,load@0.9" and len(lines) == 3
    assert lines[1].startswith("0,1500,1500,")
    assert main(["forecast", "run", "--data", "load.csv", "--steps", "3"]) == 2
    assert capsys.readouterr().err.startswith("stretto: error: --steps=3 exceeds the run's data.horizon=2")
