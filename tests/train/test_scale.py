"""Channels with labels: how they are scaled is said, stored, and applied to predictions and exports."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from stretto import Run, TrainedModel, load_config, load_model
from stretto.cli.main import main
from stretto.data import SequenceOptions, prepare_sequences
from stretto.errors import ConfigError
from stretto.exchange import export_onnx
from stretto.nn import Rows, Standardize
from stretto.serve import predict

ROWS = [[[1000.0 + 3 * (row % 7) + step, 0.01 * row] for step in range(2 + row % 3)] for row in range(40)]


def train(folder: Path, **data: object) -> TrainedModel:
    """Train a classifier of short series with a large offset and a missing value; the last row is the longest."""
    rows: list[list[list[float | None]]] = [[list(step) for step in row] for row in ROWS]
    rows[3][1][0] = None
    lines = [json.dumps({"values": row, "label": "ab"[index % 2]}) for index, row in enumerate(rows)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    prepare_sequences(folder / "rows.jsonl", folder / "data", SequenceOptions(sequence="values", label="label"))
    fields = "".join(f"{name} = {json.dumps(value)}\n" for name, value in data.items())
    (folder / "run.toml").write_text(
        f'[data]\ntrain = "{folder}/data"\nbudget = 64\n{fields}[model]\nlayers = 1\nhidden = 6\n'
        f'[train]\nsteps = 3\n[run]\nfolder = "{folder}/run"\ndevice = "cpu"\n'
    )
    list(Run(load_config(folder / "run.toml")).events())
    return load_model(folder / "run")


def raw_row(index: int) -> torch.Tensor:
    row = torch.tensor(ROWS[index]).unsqueeze(1)
    if index == 3:
        row[1, 0, 0] = torch.nan
    return row


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("scale", ["standard", "none"])
def test_raw_values_give_the_same_labels_in_predictions_the_raw_stack_and_onnx(
    tmp_path: Path, scale: str, masks: bool
) -> None:
    trained = train(tmp_path, scale=scale, masks=masks)
    results = list(predict(trained, tmp_path / "rows.jsonl"))
    export_onnx(trained, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert session.get_modelmeta().custom_metadata_map["stretto.raw_inputs"] == "true"
    names = [value.name for value in session.get_inputs()]
    assert names == ["x", "state.0.h", "state.0.c"], "the blocks keep their indices"
    for index in (0, 3, 38):
        x = raw_row(index)
        stack = trained.raw_stack
        with torch.no_grad():
            y, _ = stack(x, stack.begin(Rows.of(1)))
        zeros = np.zeros((1, 1, 6), np.float32)
        (onnx_y,) = session.run(["y"], {"x": x.numpy(), "state.0.h": zeros, "state.0.c": zeros})
        torch.testing.assert_close(torch.from_numpy(onnx_y), y, rtol=1e-5, atol=1e-6)
        probability, label = y[-1, 0].double().softmax(0).max(0)
        assert results[index]["label"] == "ab"[int(label)]
        assert results[index]["probability"] == pytest.approx(float(probability), rel=1e-5)


def test_without_scaling_the_network_sees_the_values_themselves(tmp_path: Path) -> None:
    first = train(tmp_path, scale="none").raw_stack[0]
    assert isinstance(first, Standardize) and first.mean == (0.0, 0.0) and first.std == (1.0, 1.0)


def test_the_command_says_how_channels_are_scaled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path)
    assert main(["train", str(tmp_path / "run.toml")]) == 0
    assert "scale   standard: channels are (value - mean) / std of the training data (data.scale)" in (
        capsys.readouterr().out
    )
    assert main(["train", str(tmp_path / "run.toml"), "--data.scale", "none"]) == 2
    assert "data.scale=none, but" in capsys.readouterr().err, "a run keeps its scale"


def test_standardize_refuses_what_it_can_not_scale() -> None:
    with pytest.raises(ConfigError, match="one mean and one std > 0 per channel"):
        Standardize([0.0, 1.0], [1.0])
    with pytest.raises(ConfigError, match="has 2 channels, but got 1"):
        Standardize([0.0, 1.0], [1.0, 1.0])(torch.zeros(1, 1, 1), ())
