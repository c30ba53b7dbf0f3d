"""Text columns through the commands: init, show, train, predict, forecast, export and prepare, with no edit between."""

import json
from pathlib import Path

import pytest

from stretto import load_config, load_model
from stretto.cli.main import main
from stretto.store.sequences import Sequences


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0, capsys.readouterr().err
    return " ".join(capsys.readouterr().out.split())


def write_sales(path: str, stores: str = "ab", num_future: int = 0) -> None:
    lines = ["store,day,sky,remark,sold"]
    for store in stores:
        for day in range(60 + num_future):
            sold = f"{day % 3 + (10 if store == 'a' else 0)}" if day < 60 else ""
            lines.append(f"{store},{day},{('sun', 'rain')[day % 2]},remark {store}{day},{sold}")
    Path(path).write_text("\n".join(lines) + "\n")


def test_a_forecast_with_static_and_known_texts(capsys: pytest.CaptureFixture[str]) -> None:
    write_sales("sales.csv")
    options = ["--by", "store", "--time", "day", "--static", "store", "--known-future", "sky", "--horizon", "2"]
    said = call(capsys, "init", "sales.csv", "--kind", "series", "--name", "a", *options, "--context", "4", "--yes")
    assert "numbers in sold, categories in sky" in said
    assert "read as categories: sky (--inputs=NAMES chooses the columns to read)" in said
    assert "ignored, since neither numbers nor few different texts: remark (text)" in said
    assert "3 channels (sky: 2 categories, sold, store: 2 categories)" in said
    config = load_config("run.toml")
    assert (config.data.static, config.data.known_future) == (("store",), ("sky",))
    shown = call(capsys, "show", "run.toml")
    assert "inputs 5 channels (4 of them categories)" in shown and "EmbedCategories" in shown
    call(capsys, "train", "run.toml", "--train.steps", "2", "--train.warmup", "0")
    write_sales("next.csv", "b", num_future=2)
    assert "60" in call(capsys, "forecast", "runs/a", "--data", "next.csv")
    call(capsys, "predict", "runs/a", "--data", "sales.csv", "--out", "out.jsonl")
    assert {*json.loads(Path("out.jsonl").read_text().splitlines()[0])["forecast"]} == {"sold"}
    call(capsys, "export", "runs/a", "--onnx", "a.onnx")
    assert main(["export", "runs/a", "--torch", "a.safetensors"]) == 2
    assert "block 0 (EmbedCategories) has no equivalent in torch" in " ".join(capsys.readouterr().err.split())


def test_prepare_names_what_it_leaves_out_and_validation_files_have_the_same_codes(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    write_sales("sales.csv")
    said = call(capsys, "prepare", "series", "sales.csv", "--out", "out", "--by", "store", "--time", "day")
    assert "2 channels (sky: 2 categories, sold)" in said
    assert "ignored, since neither numbers nor few different texts: remark" in said
    Path("valid.csv").write_text(Path("sales.csv").read_text().replace("sun", "fog"))
    options = ["--kind", "series", "--by", "store", "--inputs", "sky,sold", "--valid", "valid.csv"]
    call(capsys, "init", "sales.csv", "--name", "a", *options, "--horizon", "2", "--context", "4", "--yes")
    train, valid = (Sequences.open(f"data/a/{split}") for split in ("train", "valid"))
    assert train.fields.values == valid.fields.values
    assert caplog.messages == ["60 values of 'sky' not among its 2 categories in the training data: read as unknown"]


def test_init_refuses_a_text_to_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    write_sales("sales.csv")
    assert main(["init", "sales.csv", "--kind", "series", "--inputs", "sky,sold", "--static", "remark", "--yes"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "--static=remark is not a column of numbers or categories; choose from sky, sold" in error


def test_a_run_on_a_data_frame_with_text(capsys: pytest.CaptureFixture[str]) -> None:
    write_sales("sales.csv")
    Path("frames.py").write_text(
        "import pandas, stretto\n"
        "def make():\n"
        "    frame = pandas.read_csv('sales.csv')\n"
        "    inputs, options = ['sky', 'store'], {'by': 'store', 'time': 'day'}\n"
        "    train = stretto.data.from_table(frame, inputs, 'sold', target_kind='values_per_step', **options)\n"
        "    other = frame[frame.store == 'b']\n"
        "    valid = stretto.data.from_table(\n"
        "        other, inputs, 'sold', target_kind='values_per_step', classes=train.categories, **options)\n"
        "    return train.cut(20), valid\n"
    )
    Path("run.toml").write_text(
        '[data]\nfactory = "frames.py:make"\nbudget = 200\n[model]\nlayers = 1\nhidden = 8\n'
        '[train]\nsteps = 4\n[run]\nfolder = "runs/a"\ndevice = "cpu"\n'
    )
    call(capsys, "train", "run.toml")
    trained = load_model("runs/a")
    assert trained.data_spec.categories == {"sky": ("rain", "sun"), "store": ("a", "b")}
    Path("frames.py").write_text(Path("frames.py").read_text().replace("train.categories", "{'store': ['b', 'a']}"))
    assert main(["train", "run.toml", "--run.folder", "runs/b"]) == 2
    assert "in the categories of its text" in " ".join(capsys.readouterr().err.split())
