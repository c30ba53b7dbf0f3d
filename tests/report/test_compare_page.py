"""A comparison of runs shows their curves in one chart and the differences of their configs."""

import json
from pathlib import Path

import pytest

from helpers.html_page import ParsedPage, assert_self_contained
from stretto.base.run_folder import DATA_SPEC
from stretto.errors import ConfigError
from stretto.report import render_comparison


def write_run(folder: Path, lr: float, num_steps: int = 30) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(f'[data]\ntrain = "gone"\n[train]\nlr = {lr}\n[run]\nfolder = "{folder}"\n')
    with (folder / "log.jsonl").open("w") as log:
        for number in range(1, num_steps + 1):
            line = {
                "kind": "step", "step": number, "epoch": 1, "loss": 3 / number, "num_targets": 10, "gradient_norm": 1.0,
                "learning_rate": lr, "data_seconds": 0.0, "compute_seconds": 1.0, "optimizer_seconds": 0.0,
            }  # fmt: skip
            log.write(json.dumps(line) + "\n")
        log.write(json.dumps({"kind": "evaluation", "step": num_steps, "loss": 0.5, "num_targets": 10}) + "\n")
    return folder


def test_runs_share_one_chart_and_only_differences_are_listed(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "one", 0.1), write_run(tmp_path / "two", 0.2, num_steps=50)]
    text = render_comparison(runs)
    assert_self_contained(text)
    page = ParsedPage(text)
    assert page.sections == ["curves", "results", "configuration"]
    (label,) = {label for label in page.labels() if label.startswith("Training loss")}
    assert "one: from" in label and "two: from" in label
    assert "train.lr" in page.text and "0.2" in page.words
    assert "model.hidden" not in page.text and "run.folder" not in page.text
    assert text == render_comparison(runs)


def test_runs_with_the_same_name_are_named_by_their_folders(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / place / "<b>run", 0.1) for place in ("here", "there")]
    page = ParsedPage(render_comparison(runs))
    assert "here/<b>run" in page.words and "there/<b>run" in page.words
    assert "the configs are the same except for the folder" in page.text


def test_runs_without_configs_are_not_called_equal(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, 0.1) for name in ("one", "two")]
    for run in runs:
        (run / "config.toml").write_text("[train")
    text = ParsedPage(render_comparison(runs)).text
    assert "fewer than two runs have a readable config" in text and "the configs are the same" not in text


def test_one_run_or_more_than_eight_are_an_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", 0.1)
    for number, runs in ((1, "1 run"), (9, "9 runs")):
        with pytest.raises(ConfigError, match=f"^{runs} can't be compared on one page; give 2 to 8"):
            render_comparison([run] * number)


def test_an_axis_of_tokens_and_labels_is_called_targets(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, 0.1) for name in ("tokens", "labels")]
    assert "tokens trained on" in render_comparison(runs)
    (runs[1] / DATA_SPEC).write_text('{"task": {"targets": "class_per_row"}}')
    assert 'data-x="targets trained on"' in render_comparison(runs)
