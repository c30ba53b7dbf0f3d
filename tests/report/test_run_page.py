"""The report page of a run: finished, interrupted, short, long, on many ranks, or with a damaged log."""

import json
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from helpers.html_page import ParsedPage, assert_self_contained
from stretto import Run
from stretto.base.bounded_read import MAX_READ_BYTES
from stretto.config.run import RunConfig
from stretto.config.toml import parse_config
from stretto.data import Corpus
from stretto.errors import ConfigError, DivergedError
from stretto.plan.schedule import stage_schedule
from stretto.plan.simulator import simulate
from stretto.plan.trace import RankTrace, Trace, TraceEvent
from stretto.report import render_run
from stretto.report.record_reader import read_record

SECTIONS = ["curves", "configuration", "timeline", "balance", "failures", "checkpoints", "results"]


def config_of(folder: Path, data: str, **sections: dict[str, object]) -> RunConfig:
    base: dict[str, dict[str, object]] = {
        "data": {"train": data, "valid": data, "lanes": 8, "window": 20},
        "model": {"hidden": 12},
        "train": {"steps": 25},
        "run": {"folder": folder, "eval_every": 10},
        "save": {"every": 10},
    }
    return parse_config({name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}})


def train(config: RunConfig) -> Path:
    for _ in Run(config).events():
        pass
    return config.run.folder


@pytest.fixture(scope="module")
def finished(byte_corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(config_of(tmp_path_factory.mktemp("runs") / "first", byte_corpus.location))


def write_log(folder: Path, lines: Iterable[dict[str, Any]], end: str = "", config: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(config or '[data]\ntrain = "gone"\n')
    with (folder / "log.jsonl").open("w") as log:
        for line in lines:
            log.write(json.dumps(line) + "\n")
        log.write(end)
    return folder


def step(number: int, **more: object) -> dict[str, Any]:
    usual = {"loss": 5 / number, "num_targets": 100, "gradient_norm": 1.0, "learning_rate": 0.1}
    seconds = {"data_seconds": 0.1, "compute_seconds": 0.8, "optimizer_seconds": 0.1}
    return {"kind": "step", "step": number, "epoch": 1, **usual, **seconds, "skipped": 0, **more}


def ranks(**more: object) -> dict[str, Any]:
    usual = {"seconds": 2.0, "busy": [1.5, 0.5], "waiting": [0.5, 1.5], "memory": [1e9, 3e9]}
    return {"kind": "ranks", "step": 1, **usual, **more}


def test_the_page_of_a_finished_run_has_every_section(finished: Path) -> None:
    text = render_run(finished)
    assert_self_contained(text)
    page = ParsedPage(text)
    assert page.sections == SECTIONS
    for words in ("finished", "2 LSTM layers of 12", "25 steps of adamw", "One launch, no failures"):
        assert words in page.text
    labels = " ".join(page.labels())
    for chart in ("Loss.", "Learning rate", "Gradient norm", "Speed", "Step 10, measured", "Mean step of rank 0"):
        assert chart in labels
    last = read_record(finished).evaluations.last
    assert last is not None
    assert f"{last['loss']:.4f}" in page.text, "the loss in the log"


def test_the_same_files_give_the_same_page(finished: Path) -> None:
    assert render_run(finished) == render_run(str(finished))


def test_each_chart_is_drawn_once_with_a_view_per_x_axis(finished: Path) -> None:
    page = ParsedPage(render_run(finished))
    assert sum(label.startswith("Loss.") for label in page.labels()) == 1
    assert sum("data-y" in attributes for _, attributes in page.elements) == 5, "loss, rate, norm, speed, accuracy"
    for name in ("by-steps", "by-seconds", "by-targets"):
        assert sum(tag == "g" and attributes.get("class") == name for tag, attributes in page.elements) == 5


def test_a_resumed_run_says_which_checkpoint_it_resumed_from(byte_corpus: Corpus, tmp_path: Path) -> None:
    run = Run(config_of(tmp_path / "run", byte_corpus.location))
    for event in run.events():
        if getattr(event, "step", 0) == 14:
            break
    run.close()
    with (tmp_path / "run" / "log.jsonl").open("a") as log:
        log.write('{"kind": "step", "step": 15, "lo')
    half = ParsedPage(render_run(tmp_path / "run"))
    assert "not finished" in half.text and "1 unreadable line in its log" in half.text
    folder = train(config_of(tmp_path / "run", byte_corpus.location, train={"steps": 25, "lr": 5e-4}))
    page = ParsedPage(render_run(folder))
    assert "was launched 2 times" in page.text
    assert "step-000000010-g1" in page.text and "train.lr 0.001 -> 0.0005" in page.text
    assert "restarted after step 10 on 1 rank" in page.words, "the curve has a mark"


def test_comparisons_of_weights_are_counted(tmp_path: Path) -> None:
    start = {"kind": "start", "step": 0, "generation": 1, "resumed_from": None, "ranks": 3, "layout": "3 x 1 x 1 x 1"}
    checks = [{"kind": "weights", "step": number, "num_copies": 3, "num_checks": number} for number in (2, 4)]
    lines = [start, step(1), step(2), checks[0], step(3), step(4), checks[1]]
    page = ParsedPage(render_run(write_log(tmp_path / "run", lines)))
    assert "were compared 6 times and were the same; the last time after step 4, on 3 ranks each" in page.text


def test_a_diverged_run_says_so_and_names_the_saved_batch(byte_corpus: Corpus, tmp_path: Path) -> None:
    wild = {"steps": 20, "lr": 1e38, "optimizer": "sgd", "clip": 0.0}
    with pytest.raises(DivergedError):
        train(config_of(tmp_path / "run", byte_corpus.location, train=wild))
    text = render_run(tmp_path / "run")
    assert_self_contained(text)
    page = ParsedPage(text)
    assert "stopped: non-finite values" in page.text and "rank-0.safetensors" in page.text


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "The log has no steps yet"),
        ([step(1)], "2 unreadable lines in its log"),
        ([step(1, loss=None, gradient_norm=None)], "No finite value was logged"),
        ([step(number, loss=None if number % 2 else 1.0) for number in range(1, 9)], "non-finite values in 4 steps"),
        ([step(1), step(2, skipped=1), step(3, skipped=1)], "skipped 1 step"),
        ([step(1), {"kind": "save", "step": 1, "error": "disk full", "num_bytes": 0}], "had 1 failed save"),
        ([step(1, loss=1e308, gradient_norm=1e-320), step(2, loss=-1e308)], "Curves"),
        ([{"kind": "ranks"}, {"kind": "step"}, {"kind": 3}, {"step": 1}], "Curves"),
        ([step(1), {"kind": "evaluation", "step": 1, "loss": None, "num_targets": 1, "perplexity": None}], "Curves"),
        ([step(1), ranks(seconds=0)], "no per-rank measurements"),
        ([step(1), ranks(seconds=0, busy=[0], waiting=[0], memory=[1])], "no per-rank measurements"),
        ([step(1), ranks(busy=[0, 0])], "1.00 times the mean"),
        ([step(1), ranks(memory=[None, None])], "Rank 0 was busiest"),
        ([step(1), ranks(busy=[1], waiting=[None], memory=[None])], "peak memory -"),
        ([step(1), ranks(busy=[10**400, 1])], "no per-rank measurements"),
        ([step(1, tokens=10**400, skipped=10**400), step(10**400)], "Curves"),
        ([step(1, tokens=-1e308, compute_seconds=1e308), step(2)], "Curves"),
        ([step(1), {"kind": "save", "step": 1}], "1 checkpoint in the log"),
        ([{"kind": "save", "step": 1, "num_bytes": size} for size in [3e6] * 401 + [7e6]], "the last one is 7 MB"),
    ],
)
def test_any_log_becomes_a_page(tmp_path: Path, lines: list[dict[str, Any]], words: str) -> None:
    text = render_run(write_log(tmp_path / "run", lines, "[1, 2]\n\x00\n"))
    assert_self_contained(text)
    page = ParsedPage(text)
    assert words in page.text and page.sections == SECTIONS
    assert "nan" not in text.lower() and "inf" not in page.text.lower().replace("information", "")


def test_the_balance_of_two_ranks_is_described_and_drawn(tmp_path: Path) -> None:
    page = ParsedPage(render_run(write_log(tmp_path / "run", [step(1), ranks()])))
    assert "50% of all ranks' time was spent waiting" in page.text and "Rank 0 was busiest with 1.5 s" in page.text
    assert any(label == "Peak memory: rank 0 1 GB; rank 1 3 GB" for label in page.labels())


def write_trace(folder: Path, replicas: int, stages: int, chunks: int) -> None:
    timeline = simulate(
        [stage_schedule(stage, stages, 1, chunks) for stage in range(stages)], lambda stage, action: 0.01
    )
    rows = [
        RankTrace(
            rank,
            rank // stages,
            rank % stages,
            tuple(TraceEvent.of(s) for s in timeline.timed_actions if s.stage == rank % stages),
        )
        for rank in range(replicas * stages)
    ]
    (folder / "trace.json").write_text(Trace.of(10, rows).to_json())


def test_the_page_of_512_ranks_stays_small(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [step(number) for number in range(1, 30)]
    busy = [1 + math.sin(rank) / 4 for rank in range(512)]
    lines.append(ranks(busy=busy, waiting=[0.5] * 512, memory=[1] * 512))
    folder = write_log(tmp_path / "run", lines)
    write_trace(folder, 64, 8, 16)
    text = render_run(folder)
    page = ParsedPage(text)
    assert "The first 32 of 512 traced ranks are shown" in page.text and "The mean step on 512 ranks" in page.text
    assert len(text) < 2_000_000 and page.count("rect") < 6000


def test_a_log_of_200_000_steps_gives_a_small_page_in_bounded_time(tmp_path: Path) -> None:
    line = json.dumps(step(1)).replace('"step": 1,', '"step": %d,').replace('"loss": 5.0', '"loss": %f')
    folder = write_log(tmp_path / "run", [])
    with (folder / "log.jsonl").open("w") as log:
        log.writelines(line % (number, 1 + 5 / number) + "\n" for number in range(1, 200_001))
    fractions: list[float] = []
    started = time.process_time()
    text = render_run(folder, fractions.append)
    assert time.process_time() - started < 30
    assert len(text) < 1_000_000 and "200,000" in text
    assert fractions == sorted(fractions) and 50 < len(fractions) <= 101 and fractions[-1] <= 1


def test_the_headline_is_the_best_value_of_the_monitored_metric(tmp_path: Path) -> None:
    def evaluation(number: int, loss: float, accuracy: float | None) -> dict[str, Any]:
        return {"kind": "evaluation", "step": number, "loss": loss, "num_targets": 9, "accuracy": accuracy}

    start = {"kind": "start", "step": 0, "generation": 1, "monitor": "accuracy", "mode": "max"}
    lines = [start, step(1), evaluation(1, 0.5, 0.6), step(2), evaluation(2, 0.7, 0.8), evaluation(3, 0.9, None)]
    text = ParsedPage(render_run(write_log(tmp_path / "run", lines))).text
    assert "0.8 best validation accuracy, at step 2" in text and "0.7000 validation loss at step 2" in text
    assert "best validation accuracy 0.8 at step 2" in text and "best validation loss" not in text
    # A launch that monitors something else compares only its own evaluations, as early stopping does.
    lines += [{**start, "step": 3, "monitor": "loss", "mode": "min"}, step(4), evaluation(4, 0.65, 0.5)]
    text = ParsedPage(render_run(write_log(tmp_path / "changed", lines))).text
    assert "0.6500 best validation loss, at step 4" in text


def test_markup_in_names_stays_text(tmp_path: Path) -> None:
    hostile = '<script>alert(1)</script><img src=x onerror="alert(2)">'
    start = {"resumed_from": hostile, "ranks": hostile, "layout": hostile, "changes": [hostile], "monitor": hostile}
    lines = [
        {"kind": "start", "step": 0, "generation": 1, **start},
        step(1),
        {"kind": "evaluation", "step": 1, "loss": 1.0, hostile: 2.0},
        {"kind": "save", "step": 1, "error": hostile},
    ]  # fmt: skip
    config = f"[data]\ntrain = '{hostile}'\n[model]\nfactory = '{hostile}'\n"
    folder = write_log(tmp_path / hostile.replace("/", "\\"), lines, config=config)
    (folder / "data_spec.json").write_text(json.dumps({"task": {"targets": hostile}}))
    (folder / "trace.json").write_text(hostile)
    (folder / "nonfinite").mkdir()
    (folder / "nonfinite" / "step-2-<b>.safetensors").touch()
    text = render_run(folder)
    assert_self_contained(text)
    assert text.count("<script>") == 1 and "<img" not in text and "<b>." not in text


def test_a_config_without_a_log_or_a_log_without_a_config_is_enough(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run", [step(1), step(2)])
    (folder / "log.jsonl").rename(tmp_path / "log.jsonl")
    assert "The log has no steps yet" in ParsedPage(render_run(folder)).text
    (folder / "config.toml").write_text("not = [toml")
    (tmp_path / "log.jsonl").rename(folder / "log.jsonl")
    page = ParsedPage(render_run(folder))
    assert "some sections of this page need it" in page.text and "2.5000" in page.text
    assert page.sections == SECTIONS


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; give the folder of a run"):
        render_run(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"does not contain a run \(config.toml and log.jsonl are missing\)"):
        render_run(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        render_run(tmp_path / "file")


def test_files_and_lines_that_are_too_large_are_left_out(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run", [step(1)])
    with (folder / "log.jsonl").open("r+b") as log:
        log.seek(MAX_READ_BYTES + 1, os.SEEK_END)  # a hole in the file: one long line of zeros
        log.write(b"\n" + json.dumps(step(2)).encode() + b"\n")
    for name in ("data_spec.json", "trace.json"):
        (folder / name).touch()
        os.truncate(folder / name, MAX_READ_BYTES + 1)
    record = read_record(folder)
    assert (record.steps.last_step, record.num_unreadable_lines) == (2, 1)
    assert "trace.json is larger than 128 MiB" in ParsedPage(render_run(folder)).text


def test_the_page_says_why_a_config_is_refused(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run", [step(1)])
    for text, problem in (
        ("a" + ".a" * 60_000 + " = 1", "config.toml is not valid TOML: a key has more than 64 parts; correct the file"),
        ("a" + ".a" * 100_000 + " = 1", "config.toml is larger than 128 KiB, the limit for files of its kind; don't"),
        ("[model]\nhiden = 1", "config.toml: model.hiden is not a known field; did you mean hidden?"),
    ):
        (folder / "config.toml").write_text(text)
        page = ParsedPage(render_run(folder))
        assert problem in page.text and "some sections of this page need it" in page.text and "5.0000" in page.text


@pytest.mark.parametrize("name", ["data_spec.json", "trace.json", "config.toml"])
def test_a_file_that_is_nested_too_deeply_does_not_end_the_report(name: str, tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run", [step(1)])
    (folder / name).write_text(("a = " if name == "config.toml" else "") + "[" * 100_000)
    assert "5.0000" in ParsedPage(render_run(folder)).text
