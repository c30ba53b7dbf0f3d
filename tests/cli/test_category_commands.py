"""Text columns through the commands: init, show, train, predict, forecast, export and prepare, with no edit between."""

import json
from pathlib import Path

import numpy as np
import pandas  # type: ignore[import-untyped, unused-ignore]
import pytest

from stretto import load_config, load_model
from stretto.cli.main import main
from stretto.data import from_table
from stretto.serve import predict_arrays
from stretto.store.sequences import Channels, Sequences


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


def read_channel(location: str, name: str) -> list[list[float]]:
    """Return the values of a channel in each series of a store."""
    sequences = Sequences.open(location)
    rows = [(shard, index) for shard, size in enumerate(sequences.shard_sizes) for index in range(size)]
    assert isinstance(sequences.fields.values, Channels)
    channel = sequences.fields.values.names.index(name)
    return [values[:, channel].tolist() for values in sequences.read(sequences.step_ranges(rows))]


def forecast_values(path: str, out: str) -> list[str]:
    assert main(["forecast", "runs/a", "--data", path, "--out", out]) == 0
    return [line.rsplit(",", 1)[1] for line in Path(out).read_text().splitlines()[1:]]


def test_a_forecast_with_static_and_known_texts(capsys: pytest.CaptureFixture[str]) -> None:
    write_sales("sales.csv")
    options = ["--by", "store", "--time", "day", "--static", "store", "--known-future", "sky", "--horizon", "2"]
    said = call(capsys, "init", "sales.csv", "--kind", "series", "--name", "a", *options, "--context", "4", "--yes")
    assert "numbers in sold, categories in sky" in said
    assert "read as categories: sky (--inputs=NAMES chooses the columns to read)" in said
    assert "ignored, since neither numbers nor few different texts: remark (text)" in said
    assert "3 channels (sky: 2 categories, sold, store: 2 categories)" in said
    # The names are in alphabetical order, and the code of the first is 1.
    assert read_channel("data/a/train", "sky") == [[2.0, 1.0] * 24] * 2, "sun, rain, sun, ..."
    assert read_channel("data/a/train", "store") == [[1.0] * 48, [2.0] * 48]
    config = load_config("run.toml")
    assert (config.data.static, config.data.known_future) == (("store",), ("sky",))
    shown = call(capsys, "show", "run.toml")
    assert "inputs 5 channels (4 of them categories)" in shown and "EmbedCategories" in shown
    call(capsys, "train", "run.toml", "--train.steps", "2")
    write_sales("next.csv", "b", num_future=2)
    assert "60" in call(capsys, "forecast", "runs/a", "--data", "next.csv")
    expected, table = forecast_values("next.csv", "expected.csv"), Path("next.csv").read_text()
    # The model sees the sky of the future days and the store, so other ones give another forecast.
    Path("sky.csv").write_text(table.replace("b,60,sun", "b,60,rain"))
    Path("store.csv").write_text(table.replace("b,", "a,"))
    Path("unknown.csv").write_text(table.replace("b,", "c,"))
    others = [forecast_values(f"{name}.csv", f"{name}-out.csv") for name in ("sky", "store", "unknown")]
    assert len({tuple(values) for values in (expected, *others)}) == 4
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
    assert read_channel("data/a/train", "sky") == [[2.0, 1.0] * 30] * 2, "sun, rain, sun, ..."
    assert read_channel("data/a/valid", "sky") == [[0.0, 1.0] * 30] * 2, "fog is not known"
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
    frame = pandas.read_csv("sales.csv")
    classes = trained.data_spec.categories
    rows, swapped = (
        from_table(
            table, ["sky", "store"], "sold", by="store", time="day", target_kind="values_per_step", classes=classes
        )
        for table in (frame, frame.replace({"sky": {"sun": "rain", "rain": "sun"}}))
    )
    outputs, other = (predict_arrays(trained, items, per_step=True) for items in (rows, swapped))
    codes = [np.array([[2 - day % 2, store + 1] for day in range(60)], np.float32) for store in range(2)]
    by_hand = predict_arrays(trained, codes, per_step=True)
    for row in range(2):
        np.testing.assert_array_equal(outputs[row], by_hand[row])
        assert np.abs(np.subtract(outputs[row], other[row])).max() > 1e-4
    Path("frames.py").write_text(Path("frames.py").read_text().replace("train.categories", "{'store': ['b', 'a']}"))
    assert main(["train", "run.toml", "--run.folder", "runs/b"]) == 2
    assert "in the categories of its text" in " ".join(capsys.readouterr().err.split())
