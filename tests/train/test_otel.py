"""OpenTelemetry: what a collector receives from the nodes of a run, and that a run needs no collector to go on."""

import json
import logging
import re
import socket
import sys
import time
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.otlp_receiver import OtlpReceiver
from helpers.rank_pool import RankPools
from stretto import Run, World, load_config
from stretto.data import Corpus
from stretto.errors import ConfigError
from stretto.launch.rank_environment import free_port
from stretto.report.balance import balance_section
from stretto.report.record_reader import read_record
from stretto.train import LoggingConfig, NodeReport, NodeSinks, open_sinks
from stretto.train.rank_monitor import _report_node
from stretto.train.sinks.otlp_metrics import find_url
from stretto.train.start import prepare_run

SECRET = "TOPSECRET"
HOSTS = ["alpha", "beta", "alpha"]  # of ranks 0, 1 and 2: a launcher need not number the ranks of a node one by one
SLOW_MODEL = """
import os, time
from stretto.nn import Block, Embedding, Linear, Stack

class PausesOnOneRank(Block):
    def forward(self, x, state):
        time.sleep(0.2 if os.environ.get("RANK") == "1" else 0.0)
        return x, state

def model(task):
    return Stack([Embedding(task.num_inputs, 8), PausesOnOneRank(), Linear(8, task.num_outputs)])
"""
HISTOGRAMS = {
    f"stretto.rank.{name}" for name in ("step.duration", "busy.duration", "waiting.duration", "data.duration", "memory")
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector of whoever runs the tests must not get their metrics."""
    for name in ("ENDPOINT", "METRICS_ENDPOINT", "HEADERS", "METRICS_HEADERS", "TIMEOUT"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    monkeypatch.delenv("OTEL_METRIC_EXPORT_INTERVAL", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def write_config(corpus: Corpus, folder: Path, endpoint: str, steps: int = 8) -> Path:
    path = folder / "run.toml"
    path.write_text(
        f'[data]\ntrain = "{corpus.location}"\nlanes = 9\nwindow = 20\n[train]\nsteps = {steps}\n'
        f'[run]\nfolder = "{folder / "run"}"\nlog_every = 2\n[logging]\notlp_endpoint = "{endpoint}"\n'
    )
    return path


def read_log(folder: Path, kind: str) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def train_on_host(world: World, path: Path, model: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: HOSTS[world.rank])
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Bearer%20{SECRET}")
        patch.setenv("no_proxy", "127.0.0.1")
        list(Run(load_config(path, {"layout.replicas": str(world.size), "model.factory": model}), world).events())


def test_each_node_pushes_histograms_of_its_ranks_and_rank_0_the_run_and_the_straggler(
    byte_corpus: Corpus, tmp_path: Path, pools: RankPools
) -> None:
    (tmp_path / "slow.py").write_text(SLOW_MODEL)
    with OtlpReceiver() as receiver:
        path = write_config(byte_corpus, tmp_path, receiver.url)
        pools[3].run(train_on_host, path, f"{tmp_path / 'slow.py'}:model")
    assert {push.resource["host.name"] for push in receiver.pushes} == {"alpha", "beta"}
    alpha, beta = receiver.newest("alpha"), receiver.newest("beta")
    for push in receiver.pushes:
        assert push.path == "/v1/metrics" and push.headers["authorization"] == f"Bearer {SECRET}"
        assert push.resource["service.name"] == "stretto" and push.resource["stretto.run.name"] == "run"
    assert alpha.resource["stretto.run.id"] == beta.resource["stretto.run.id"]
    assert alpha.resource["service.instance.id"] != beta.resource["service.instance.id"]

    lines = read_log(tmp_path / "run", "ranks")
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    for push, ranks in ((alpha, [0, 2]), (beta, [1])):
        histograms = push.histograms()
        assert set(histograms) == HISTOGRAMS
        assert {point.count for point in histograms.values()} == {len(ranks) * len(lines)}, (
            "a value per rank and report"
        )
        for name, field in (("busy.duration", "busy"), ("waiting.duration", "waiting"), ("memory", "memory")):
            values = [line[field][rank] for line in lines for rank in ranks]  # type: ignore[index]
            point = histograms[f"stretto.rank.{name}"]
            assert (point.min, point.max) == pytest.approx((min(values), max(values)))
            assert point.sum == pytest.approx(sum(values))
            assert name == "waiting.duration" or sum(point.bucket_counts[1:-1]) > 0, "within the buckets"
        step = histograms["stretto.rank.step.duration"]
        assert 0 <= histograms["stretto.rank.data.duration"].sum < step.sum
        assert push.gauges()["stretto.node.first_rank"] == ranks[0]
        assert push.gauges()["stretto.node.num_ranks"] == len(ranks)

    last = read_log(tmp_path / "run", "step")[-1]
    gauges = alpha.gauges()
    assert {name: gauges[f"stretto.{name}"] for name in ("step", "loss", "learning_rate", "gradient_norm")} == {
        name: last[name] for name in ("step", "loss", "learning_rate", "gradient_norm")
    }
    assert gauges["stretto.targets_per_second"] > 0 and gauges["stretto.ranks.seconds"] == lines[-1]["seconds"]
    assert set(beta.gauges()) == {"stretto.node.first_rank", "stretto.node.num_ranks"}, "the rest is pushed by rank 0"
    assert not beta.labeled()
    straggler = lines[-1]["straggler"]
    assert straggler["rank"] == 1  # type: ignore[index]
    assert alpha.labeled() == {
        f"stretto.straggler.{name}": [({"rank": "1"}, straggler[name])]  # type: ignore[index]
        for name in ("seconds", "since")
    }
    assert "rank 1 was a straggler" in str(balance_section(read_record(tmp_path / "run")))
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 5 and not any(SECRET.encode() in path.read_bytes() for path in files), "not even in checkpoints"


NODE = NodeReport(4, (8, 9, 10), (0.5, 0.5, 0.6), (0.4, 0.3, 0.2), (0.1, 0.2, 0.4), (0.01, 0.0, 0.02), (10**9,) * 3)


def test_with_delta_temporality_each_push_has_the_ranks_of_one_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "0")  # each line is pushed
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=speech,host.name=rack-7")
    with OtlpReceiver() as receiver, NodeSinks(LoggingConfig(otlp_endpoint=receiver.url), tmp_path / "new") as sinks:
        for _ in range(3):
            sinks.write_node(NODE)
    reports = [push.histograms() for push in receiver.pushes if push.histograms()]
    assert [histograms["stretto.rank.busy.duration"].count for histograms in reports] == [3, 3, 3]
    assert reports[0]["stretto.rank.busy.duration"].sum == pytest.approx(0.9)
    assert {(push.resource["team"], push.resource["host.name"]) for push in receiver.pushes} == {("speech", "rack-7")}
    assert not (tmp_path / "new").exists(), "the run's folder may not exist on other nodes"


def test_a_straggler_is_pushed_as_long_as_it_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "0")
    stragglers = [None, {"rank": 5, "since": 11, "seconds": 0.25}, {"rank": 70, "since": 21, "seconds": 0.5}, None]
    with (
        OtlpReceiver() as receiver,
        open_sinks(LoggingConfig(otlp_endpoint=f"{receiver.url}/v1/metrics/"), tmp_path) as sinks,
    ):
        for number, straggler in enumerate(stragglers, start=1):
            line = {"step": 10 * number, "seconds": 1.0, "busy": [0.5] * 3}
            sinks.write("ranks", line if straggler is None else {**line, "straggler": straggler})
    seconds = [push.labeled().get("stretto.straggler.seconds", []) for push in receiver.pushes]
    assert [value for value, _ in groupby(seconds)] == [[], [({"rank": "5"}, 0.25)], [({"rank": "70"}, 0.5)], []]
    assert all(
        set(push.labeled()) <= {"stretto.straggler.seconds", "stretto.straggler.since"} for push in receiver.pushes
    )
    assert {push.path for push in receiver.pushes} == {"/v1/metrics"}


def test_a_run_without_its_collector_goes_on_with_one_warning_and_keeps_the_secret(
    byte_corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    port = free_port()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://user:{SECRET}@127.0.0.1:{port}/in?key={SECRET}")
    with caplog.at_level(logging.WARNING):
        path = write_config(byte_corpus, tmp_path, "auto", steps=3)
        list(Run(load_config(path, {"data.workers": "1"})).events())  # a worker is forked while the sink is open
    assert len(read_log(tmp_path / "run", "step")) == 3 and (tmp_path / "run" / "weights.safetensors").is_file()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("the tracker of logging.otlp_endpoint may lack log lines (can't push")
    assert f"can't push to http://127.0.0.1:{port}/in: ConnectionError" in warning
    output = capfd.readouterr()
    assert SECRET not in caplog.text + output.out + output.err


@pytest.mark.parametrize("problem", ["silent", "refuses", "overloaded", "wrong header"])
def test_no_collector_delays_lines_or_the_end(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "4" if problem == "overloaded" else "2")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10000")
    if problem == "wrong header":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization: {SECRET}")
    status, reason = {
        "silent": (200, "no answer|ReadTimeout"), "refuses": (401, "Unauthorized"),
        "overloaded": (503, "Service Unavailable"),
        "wrong header": (200, "OTEL_EXPORTER_OTLP_HEADERS has a header that is not name=value"),
    }[problem]  # fmt: skip
    with OtlpReceiver(status) as receiver, socket.create_server(("127.0.0.1", 0)) as silent, caplog.at_level("WARNING"):
        url = f"http://127.0.0.1:{silent.getsockname()[1]}" if problem == "silent" else receiver.url
        sinks = open_sinks(LoggingConfig(otlp_endpoint=url), tmp_path)
        started = time.monotonic()
        for step in range(1000):
            sinks.write("step", {"step": step, "loss": 1.0})
        assert time.monotonic() - started < 1.5
        sinks.close()
        assert time.monotonic() - started < 20
    (warning,) = [record.getMessage() for record in caplog.records]
    assert re.search(reason, warning) and SECRET not in warning
    assert logging.getLogger("opentelemetry.util.re").filters == [], "other users of the SDK see its messages again"


def test_a_missing_package_is_refused_on_rank_0_and_on_other_ranks(
    byte_corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    config = load_config(write_config(byte_corpus, tmp_path, "auto"))
    for is_first_rank in (True, False):
        with pytest.raises(ConfigError, match=r"logging\.otlp_endpoint=auto needs opentelemetry\.\S+; pip install"):
            prepare_run(config, is_first_rank=is_first_rank)


@pytest.mark.parametrize("secret", ["http://user:pw@host:4318", "http://user@host", "https://host/v1/metrics?key=pw"])
def test_an_endpoint_with_a_secret_is_refused_without_repeating_it(secret: str) -> None:
    with pytest.raises(ConfigError, match="set OTEL_EXPORTER_OTLP_HEADERS instead") as raised:
        LoggingConfig(otlp_endpoint=secret)
    assert "pw" not in str(raised.value) and "user@" not in str(raised.value)
    for value in (
        "collector:4318",
        "grpc://collector:4317",
        "http://",
        "",
        "http://[1",
        "http://a:43l8",
        "http://a:99999",
    ):
        with pytest.raises(ConfigError, match=r"is not a URL; use one such as http://collector:4318, or auto"):
            LoggingConfig(otlp_endpoint=value)


def test_the_endpoint_is_the_config_s_or_the_environment_s(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_url("http://a:1") == find_url("http://a:1/v1/metrics") == "http://a:1/v1/metrics"
    assert find_url("https://a/otlp/") == "https://a/otlp/v1/metrics"
    assert find_url("auto") == "http://localhost:4318/v1/metrics"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://b:2/")
    assert find_url("auto") == "http://b:2/v1/metrics"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://c:3/any")
    assert find_url("auto") == "http://c:3/any"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_every_rank_is_in_the_report_of_the_first_rank_of_its_node(nodes: list[int]) -> None:
    rows = torch.tensor(
        [[node, 2.0 + rank, 0.5, 0.25, 100 + rank] for rank, node in enumerate(nodes)], dtype=torch.float64
    )
    reports = {rank: _report_node(7, rows, rank) for rank in range(len(nodes))}
    seen: list[int] = []
    for first, report in reports.items():
        assert (report is None) == (nodes[first] in nodes[:first])
        if report is not None:
            assert report.step == 7 and {nodes[rank] for rank in report.ranks} == {nodes[first]}
            assert report.seconds == tuple(2.0 + rank for rank in report.ranks)
            assert report.busy == tuple(1.5 + rank for rank in report.ranks)
            assert report.memory == tuple(100 + rank for rank in report.ranks)
            assert all(len(values) == len(report.ranks) for name, values in asdict(report).items() if name != "step")
            seen += report.ranks
    assert sorted(seen) == list(range(len(nodes)))


def test_classes_with_similar_names_are_told_apart_by_an_attribute(tmp_path: Path) -> None:
    table = {name: {"f1": number / 8} for number, name in enumerate(["größe", "grüße", "Cat", "cat", "a/b"])}
    with OtlpReceiver() as receiver, open_sinks(LoggingConfig(otlp_endpoint=receiver.url), tmp_path) as sinks:
        sinks.write("evaluation", {"step": 3, "loss": 0.5, "per_class": table})
    points = receiver.pushes[-1].labeled()["stretto.evaluation.per_class.f1"]
    assert {labels["class"]: value for labels, value in points} == {name: row["f1"] for name, row in table.items()}
    assert receiver.pushes[-1].gauges() == {"stretto.evaluation.step": 3, "stretto.evaluation.loss": 0.5}


def test_metrics_are_pushed_while_there_are_no_new_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    with OtlpReceiver() as receiver, open_sinks(LoggingConfig(otlp_endpoint=receiver.url), tmp_path) as sinks:
        sinks.write("step", {"step": 1, "loss": 2.0})
        until = time.monotonic() + 20
        while len(receiver.pushes) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        assert [push.gauges()["stretto.loss"] for push in receiver.pushes[:3]] == [2.0] * 3


def test_a_collector_that_comes_late_gets_the_last_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "60s")  # not a number: the default
    port = free_port()
    sinks = open_sinks(LoggingConfig(otlp_endpoint=f"http://127.0.0.1:{port}"), tmp_path)
    sinks.write("step", {"step": 1, "loss": 2.0})
    until = time.monotonic() + 20
    while "may lack log lines" not in caplog.text and time.monotonic() < until:
        time.sleep(0.05)
    sinks.write("step", {"step": 2, "loss": 1.0})
    with OtlpReceiver(port=port) as receiver:
        sinks.close()
    assert [push.gauges()["stretto.loss"] for push in receiver.pushes] == [1.0]


def test_an_error_on_a_rank_does_not_wait_for_a_silent_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "15")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = LoggingConfig(otlp_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ValueError, match="of a block"), NodeSinks(config, tmp_path) as sinks:
            sinks.write_node(NODE)
            started = time.monotonic()
            raise ValueError("of a block")
        assert time.monotonic() - started < 8
