"""`stretto export` and `stretto import`, as a person calls them."""

import json
from pathlib import Path

import onnx
import pytest
import torch

from helpers.random_stacks import run_stack
from stretto import load_model
from stretto.cli.main import main
from stretto.exchange import from_torch


@pytest.fixture(scope="module")
def trained(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run."""
    folder = tmp_path_factory.mktemp("export")
    assert main(["prepare", "text", str(text_file), "--out", str(folder / "data"), "--level", "word"]) == 0
    (folder / "run.toml").write_text(
        f'[data]\ntrain = "{folder}/data"\nlanes = 4\nwindow = 10\n[model]\nhidden = 8\ndropout = 0.1\n'
        f'[train]\nsteps = 2\n[run]\nfolder = "{folder}/run"\n'
    )
    assert main(["train", str(folder / "run.toml")]) == 0
    return folder


def test_a_run_is_exported_as_onnx_with_its_vocabulary(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(trained / "run"), "--onnx", str(trained / "model.onnx")]) == 0
    said = capsys.readouterr().out
    assert "x, state.2.h, state.2.c, state.4.h, state.4.c" in said
    assert "checked with onnxruntime: the largest difference from torch is" in said
    found = {entry.key: json.loads(entry.value) for entry in onnx.load(trained / "model.onnx").metadata_props[1:]}
    assert found["stretto.task"]["targets"] == "next_token"
    assert "stretto" in found["stretto.vocabulary"]["symbols"]


def test_weights_exported_to_torch_can_be_imported_to_start_a_run(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, weights = trained / "plain.safetensors", trained / "weights.safetensors"
    assert main(["export", str(trained / "run"), "--torch", str(plain)]) == 0
    assert "nn.LSTM(input_size=8, hidden_size=8, num_layers=2)" in capsys.readouterr().out
    model = load_model(trained / "run").stack
    x = torch.randint(5, (6, 2))
    assert torch.equal(run_stack(from_torch(plain), x), run_stack(model, x))
    assert main(["import", str(plain), "--out", str(weights)]) == 0
    assert "block 1   LSTM               8, 8\n" in capsys.readouterr().out
    again = ["--model.weights", str(weights), "--run.folder", str(trained / "again")]
    assert main(["train", str(trained / "run.toml"), *again]) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["export", "run"], "nothing to export; use --onnx=FILE, --torch=FILE or both"),
        (
            ["export", "run", "--onnx", "same", "--torch", "same"],
            "--onnx and --torch are both same; choose two different files",
        ),
        (["export", "nowhere", "--onnx", "model.onnx"], "nowhere"),
        (["import", "nowhere.keras", "--out", "weights.safetensors"], "nowhere.keras does not exist"),
        (["import", "nowhere.pt", "--out", "weights.safetensors"], "nowhere.pt does not exist"),
        (["import", "nowhere.pt"], "required: --out"),
    ],
)
def test_an_error_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


@pytest.mark.parametrize("option", ["--onnx", "--torch"])
def test_export_does_not_overwrite_files(trained: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = trained / "run.toml"
    before = file.read_bytes()
    assert main(["export", str(trained / "run"), option, str(file)]) == 2
    said = capsys.readouterr().err
    assert said == f"stretto: error: {option}={file} already exists; choose a different path, or delete it\n"
    assert file.read_bytes() == before


def test_import_does_not_overwrite_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(torch.nn.LSTM(3, 4).state_dict(), tmp_path / "model.pt")
    before = (tmp_path / "model.pt").read_bytes()
    assert main(["import", str(tmp_path / "model.pt"), "--out", str(tmp_path / "model.pt")]) == 2
    assert "model.pt already exists; choose a different path, or delete it\n" in capsys.readouterr().err
    assert (tmp_path / "model.pt").read_bytes() == before


def test_an_exported_forecast_records_its_channels_their_scale_and_its_targets(tmp_path: Path) -> None:
    rows = "".join(f"{hour},{hour % 7},{hour % 5}\n" for hour in range(80))
    (tmp_path / "table.csv").write_text(f"hour,wind,load\n{rows}")
    series = [
        "prepare",
        "series",
        str(tmp_path / "table.csv"),
        "--out",
        str(tmp_path / "data"),
        "--columns",
        "wind,load",
        "--known-future",
        "wind",
    ]
    assert main(series) == 0
    (tmp_path / "run.toml").write_text(
        f'[data]\ntrain = "{tmp_path}/data"\ncontext = 10\nhorizon = 3\ntargets = ["load"]\nmasks = true\n'
        f'[model]\nhidden = 4\nloss = "quantile"\n[train]\nsteps = 1\n[run]\nfolder = "{tmp_path}/run"\n'
    )
    assert main(["train", str(tmp_path / "run.toml")]) == 0
    assert main(["export", str(tmp_path / "run"), "--onnx", str(tmp_path / "model.onnx")]) == 0
    model = onnx.load(tmp_path / "model.onnx")
    found = {entry.key: json.loads(entry.value) for entry in model.metadata_props if entry.key != "stretto.version"}
    assert found["stretto.channels"]["names"] == ["wind", "load"]
    assert found["stretto.channels"]["mean"] == pytest.approx([2.9625, 2.0], abs=0.05)
    assert found["stretto.series"] == {
        "horizon": 3,
        "season": 0,
        "targets": ["load"],
        "known_future": ["wind"],
        "static": [],
        "masks": True,
        "scale": "standard",
    }
    assert found["stretto.quantiles"] == [0.1, 0.5, 0.9]
    sizes = [value.type.tensor_type.shape.dim[-1].dim_value for value in (model.graph.input[0], model.graph.output[0])]
    # In: two channels, one of them for three more hours, and masks; out: three quantiles of three hours of one channel.
    assert sizes == [2 * (2 + 3), 9]
