"""[metrics] in a config: metrics reach the log, trackers, the report and `eval`; a run can monitor one of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
import torch

from helpers.html_page import ParsedPage
from helpers.rank_pool import RankPools
from stretto import Layout, Run, StepReport, World, load_model
from stretto.checkpoint import find_checkpoint
from stretto.cli.main import main
from stretto.config.model import ModelConfig
from stretto.config.run import MetricsConfig, RunConfig
from stretto.config.toml import parse_config
from stretto.data import SequenceOptions, Task, prepare_sequences
from stretto.errors import ConfigError, PreemptedError
from stretto.report import render_run
from stretto.serve import predict
from stretto.train.metrics.config_metrics import load_metrics
from stretto.train.metrics.sum_metric import MetricFunction
from stretto.train.sinks.sink import iter_scalars
from stretto.train.trainer import Request

CODE = """
import torchmetrics

def size(outputs, targets):
    return outputs.abs().sum(), len(targets)

def share_of_a(outputs, targets):
    return (outputs.argmax(dim=1) == 0).sum(), len(targets)

kappa = torchmetrics.classification.MulticlassCohenKappa(num_classes=3)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = [{"text": "abcxyz"[row % 6] * (row % 5 + 1), "kind": ["low", "mid", "high"][row % 3]} for row in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prepare_sequences(folder / "rows.jsonl", folder / "data", SequenceOptions(label="kind"))
    (folder / "mine.py").write_text(CODE)
    return folder


def config_of(data: Path, folder: Path, metrics: Mapping[str, object], **train: object) -> RunConfig:
    return parse_config(
        {
            "data": {"train": str(data / "data"), "valid": str(data / "data"), "budget": 60},
            "model": {"hidden": 8, "layers": 2},
            "train": {"steps": 12, "lr": 0.05, **train},
            "run": {"folder": str(folder), "device": "cpu", "eval_every": 2},
            "save": {"keep_best": True, "keep": 1},
            "metrics": metrics,
        }
    )


def evaluations(folder: Path) -> list[dict[str, object]]:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "evaluation"]


def test_metrics_of_a_config_reach_log_report_and_eval(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = f"{data}/mine.py:share_of_a"
    run = Run(config_of(data, tmp_path / "run", {"names": ["f1", "per_class", mine], "monitor": "f1"}))
    list(run.events())
    lines = evaluations(tmp_path / "run")
    last = lines[-1]
    assert last["accuracy"] and 0 < float(str(last["f1"])) <= 1 and 0 <= float(str(last["share_of_a"])) <= 1
    table = last["per_class"]
    assert isinstance(table, dict) and table.keys() == {"low", "mid", "high"}
    assert sum(row["support"] for row in table.values()) == last["num_targets"] == 60
    scalars = {scalar.tag: scalar.value for scalar in iter_scalars("evaluation", last)}
    assert scalars["evaluation/f1"] == last["f1"]
    assert scalars["evaluation/per_class/low/recall"] == table["low"]["recall"]
    # The checkpoint with the highest F1 is the best.
    best = max(lines, key=lambda line: (float(str(line["f1"])), -int(str(line["step"]))))
    checkpoint = find_checkpoint(f"{tmp_path / 'run'}@best")
    assert checkpoint.manifest.training_state.step == best["step"]

    page = ParsedPage(render_run(tmp_path / "run"))
    assert "Validation f1" in page.text and "classes" in page.sections and "mid" in page.text
    assert f"best validation f1, at step {best['step']}" in page.text
    with pytest.raises(ConfigError, match=r"would run Python code \(metrics\.names='.*mine\.py:share_of_a'\)"):
        load_model(tmp_path / "run").evaluate(data / "data")
    assert len(list(predict(load_model(tmp_path / "run"), data / "data"))) == 60
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "run", "--trust"]) == 0
    printed = capsys.readouterr().out
    assert f"f1 {last['f1']:.4f}" in printed and "precision" in printed


def test_a_run_that_monitors_a_metric_stops_early_and_resumes_as_if_uninterrupted(data: Path, tmp_path: Path) -> None:
    # Outputs grow in training, so the first evaluation is the best.
    metrics = {"names": [f"{data}/mine.py:size"], "monitor": "size", "mode": "min"}
    whole = Run(config_of(data, tmp_path / "whole", metrics, patience=2))
    list(whole.events())
    assert whole.trainer.has_stopped_early and whole.trainer.step < 12
    assert whole.trainer.improvement.name == "size"
    run = Run(config_of(data, tmp_path / "run", metrics, patience=2))
    with pytest.raises(PreemptedError):
        for event in run.events():
            if isinstance(event, StepReport) and event.step == 3:
                run.trainer.request(Request.STOP)
    resumed = Run(config_of(data, tmp_path / "run", metrics, patience=2))
    assert resumed.trainer.improvement.best is not None
    list(resumed.events())
    assert resumed.trainer.improvement == whole.trainer.improvement
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "whole")
    steps = [find_checkpoint(f"{tmp_path / name}@best").manifest.training_state.step for name in ("run", "whole")]
    assert steps[0] == steps[1] == whole.trainer.improvement.best_step
    # By another metric, or another mode, the run that stopped early continues.
    first_stop = resumed.trainer.step
    other_mode = Run(config_of(data, tmp_path / "run", {**metrics, "mode": "max"}, patience=2))
    assert not other_mode.trainer.has_stopped_early
    list(other_mode.events())
    assert other_mode.trainer.step > first_stop and other_mode.trainer.improvement.mode == "max"
    last = Run(config_of(data, tmp_path / "run", {**metrics, "monitor": "loss"}, steps=14, patience=9))
    list(last.events())
    assert last.trainer.step == 14 and last.trainer.improvement.name == "loss"


def run_on_rank(world: World, data: Path, folder: Path) -> int:
    config = config_of(
        data, folder, {"names": ["f1", f"{data}/mine.py:kappa"], "monitor": "kappa"}, steps=40, patience=2
    )
    run = Run(config.model_copy(update={"layout": Layout(stages=2)}), world)
    list(run.events())
    return run.trainer.step


@pytest.mark.long
@pytest.mark.short
def test_all_ranks_monitor_the_same_metric(data: Path, tmp_path: Path, pools: RankPools) -> None:
    first, second = pools[2].run(run_on_rank, data, tmp_path / "run")
    assert first == second < 40, "it stops early"
    best = max(evaluations(tmp_path / "run"), key=lambda line: (float(str(line["kappa"])), -int(str(line["step"]))))
    assert find_checkpoint(f"{tmp_path / 'run'}@best").manifest.training_state.step == best["step"]


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (
            {"names": ["f2"]},
            r"names='f2' is not a built-in metric, and has no file or module; choose from accuracy, f1",
        ),
        ({"names": ["f1"], "monitor": "f2"}, r"monitor='f2' is not a metric of the evaluations; choose from loss, "),
        ({"names": ["per_class"], "monitor": "per_class"}, "monitor='per_class' is not a metric of the evaluations"),
        ({"names": ["f1", "a.py:f1"]}, "names has two metrics called f1; leave one out, or rename it"),
        ({"names": ["mae"]}, r"metrics\['mae'\]='mae' is for values, but the data's targets are class_per_row"),
        ({"names": ["DATA/mine.py:gone"]}, r"metrics\.names='.*mine\.py:gone': .* has no gone"),
        ({"names": ["DATA/mine.py:size"], "monitor": "size"}, "does not say whether lower or higher is better"),
    ],
)
def test_a_mistake_in_the_config_is_one_sentence(
    metrics: dict[str, object], message: str, data: Path, tmp_path: Path
) -> None:
    names = metrics["names"]
    assert isinstance(names, list)
    metrics = {**metrics, "names": [name.replace("DATA", str(data)) for name in names]}
    with pytest.raises(ConfigError, match=message):
        Run(config_of(data, tmp_path / "run", metrics))


def test_metrics_need_validation_data(data: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.names are computed in evaluations, .* set data\.valid"):
        parse_config({"data": {"train": str(data / "data")}, "metrics": {"names": ["f1"]}})


def test_a_metric_that_the_evaluations_lack_can_not_be_monitored(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.monitor='perplexity' is not a metric of the evaluations of class"):
        Run(config_of(data, tmp_path / "run", {"monitor": "perplexity"}))


def test_the_mae_of_quantiles_is_that_of_the_median() -> None:
    task, model = Task("channels", 2, "values_per_row", 2), ModelConfig(loss="quantile", quantiles=(0.2, 0.5, 0.9))
    metric = cast(
        MetricFunction, load_metrics(MetricsConfig(names=("mae",), monitor="mae"), model, task).metrics["mae"]
    )
    outputs = torch.tensor([[0.0, 1.0, 5.0, 0.0, 2.0, 9.0]] * 2)
    total, count = metric(outputs, torch.tensor([[4.0, 2.5], [float("nan"), 0.0]]))
    assert (float(total), int(count)) == (3 + 0.5 + 2, 3)
    with pytest.raises(ConfigError, match=r"needs the median, but model\.quantiles=\[0\.1, 0\.9\] has no 0\.5"):
        load_metrics(MetricsConfig(names=("mae",)), ModelConfig(loss="quantile", quantiles=(0.1, 0.9)), task)
    with pytest.raises(ConfigError, match=r"metrics\.monitor='accuracy' is not a metric of the evaluations of values"):
        load_metrics(MetricsConfig(monitor="accuracy"), ModelConfig(), task)
