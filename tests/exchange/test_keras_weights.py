"""Keras's weights against numbers that a real Keras run gave, recorded by `record_keras.py`."""

import base64
import json
import os
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from helpers.random_stacks import run_stack
from stretto.base import bounded_read
from stretto.base.bounded_read import MAX_READ_BYTES
from stretto.errors import ConfigError, DataError
from stretto.exchange import from_keras
from stretto.nn import Pointwise, Stack

RECORDED = Path(__file__).with_name("keras.json")
MODELS: dict[str, Any] = json.loads(RECORDED.read_text())["models"]


def unpack(name: str, kind: str, folder: Path) -> Path:
    path = folder / f"{name}.{'keras' if kind == 'keras' else 'weights.h5'}"
    path.write_bytes(zlib.decompress(base64.b64decode(MODELS[name][kind])))
    return path


def arrays(name: str) -> list[Any]:
    return [np.array(own, dtype=np.float32) for own in MODELS[name]["arrays"]]


def difference(stack: Stack, model: dict[str, Any]) -> float:
    """The difference between a stack's outputs and Keras's, which are batch-first."""
    inputs = np.array(model["inputs"])
    x = torch.from_numpy(inputs if inputs.ndim == 2 else inputs.astype(np.float32)).transpose(0, 1)
    y = run_stack(stack, x).transpose(0, 1).numpy()
    return float(np.abs(y - np.array(model["outputs"])).max())


@pytest.mark.parametrize("name", MODELS)
def test_a_stack_from_a_keras_file_has_the_outputs_of_keras(name: str, tmp_path: Path) -> None:
    assert difference(from_keras(unpack(name, "keras", tmp_path)), MODELS[name]) < 2e-6


@pytest.mark.parametrize("name", ["words", "gru"])
def test_a_file_of_weights_has_the_outputs_of_keras(name: str, tmp_path: Path) -> None:
    stack = from_keras(unpack(name, "h5", tmp_path))
    if name == "words":
        # Its settings are not in the file.
        stack = Stack([*stack, Pointwise(nn.Softmax(dim=-1))])
    assert difference(stack, MODELS[name]) < 2e-6


@pytest.mark.parametrize("name", ["functional", "gru"])
def test_arrays_of_get_weights_have_the_outputs_of_keras(name: str) -> None:
    assert difference(from_keras(arrays(name)), MODELS[name]) < 2e-6


def test_one_layer_of_arrays_is_one_block() -> None:
    _, *lstm = arrays("words")[:4]
    assert [own.shape for own in lstm] == [(6, 20), (5, 20), (20,)]
    assert len(from_keras(lstm)) == 1


def test_a_wrong_order_of_gates_changes_the_outputs() -> None:
    wrong = arrays("gru")
    wrong[0] = np.roll(wrong[0], 4, axis=1)
    assert difference(from_keras(wrong), MODELS["gru"]) > 1e-2


def changed(path: Path, layer: int, **settings: object) -> Path:
    """A Keras file with a changed config of one layer."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    config = json.loads(files["config.json"])
    config["config"]["layers"][layer]["config"].update(settings)
    if "class_name" in settings:
        config["config"]["layers"][layer]["class_name"] = settings["class_name"]
    files["config.json"] = json.dumps(config).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize(
    ("name", "layer", "settings", "sentence"),
    [
        ("words", 2, {"activation": "relu"}, "lstm.* has activation='relu', which torch's LSTM can't compute"),
        ("words", 2, {"recurrent_activation": "hard_sigmoid"}, "recurrent_activation='hard_sigmoid'"),
        ("words", 2, {"go_backwards": True}, "go_backwards=True"),
        ("words", 5, {"activation": "swish"}, "dense.* has activation='swish'; choose from linear, relu"),
        ("words", 3, {"class_name": "Lambda"}, r"from_keras does not support the Keras layer \w+ \(Lambda\)"),
        ("gru", 1, {"reset_after": False}, "a GRU with reset_after=False, which torch can't compute"),
        (
            "both",
            1,
            {"merge_mode": "sum"},
            r"merge_mode='sum'; from_keras supports Bidirectional\(LSTM\) with merge_mode='concat'",
        ),
        ("functional", 3, {"axis": 1}, "must normalize over features, with gamma and beta; use axis=-1"),
    ],
)
def test_settings_that_torch_does_not_have_are_refused(
    name: str, layer: int, settings: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        from_keras(changed(unpack(name, "keras", tmp_path), layer, **settings))


def test_layers_that_do_not_run_one_after_the_other_are_refused(tmp_path: Path) -> None:
    path = unpack("functional", "keras", tmp_path)
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    config = json.loads(files["config.json"])
    layers = config["config"]["layers"]
    layers[4]["inbound_nodes"] = layers[2]["inbound_nodes"]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", json.dumps(config))
        archive.writestr("model.weights.h5", files["model.weights.h5"])
    with pytest.raises(ConfigError, match="from_keras supports models whose layers run one after the other"):
        from_keras(path)


def in_archive(weights: Path, path: Path) -> Path:
    """A Keras file with changed weights."""
    with zipfile.ZipFile(path) as archive:
        config = archive.read("config.json")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", config)
        archive.write(weights, "model.weights.h5")
    return path


@pytest.mark.parametrize("where", ["layers", "layers/dense", "layers/dense/vars", "layers/dense/vars/0"])
@pytest.mark.parametrize("is_soft", [False, True])
def test_a_link_out_of_the_file_is_not_followed(where: str, is_soft: bool, tmp_path: Path) -> None:
    path, other = unpack("gru", "h5", tmp_path), unpack("gru", "h5", tmp_path).rename(tmp_path / "other.h5")
    path.write_bytes(other.read_bytes())
    with h5py.File(path, "a") as opened:
        opened.move(where, "kept")
        opened[where] = h5py.SoftLink("/kept") if is_soft else h5py.ExternalLink(other, where)
    for file in (path, in_archive(path, unpack("gru", "keras", tmp_path))):
        with pytest.raises(DataError, match=f"^{where} in a Keras file is a link or external data"):
            from_keras(file)


def test_an_array_in_another_file_is_not_read(tmp_path: Path) -> None:
    path = unpack("gru", "h5", tmp_path)
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["secret"] = np.zeros((4, 2), dtype=np.float32)
    layout = h5py.VirtualLayout((4, 2), np.float32)
    layout[:] = h5py.VirtualSource(tmp_path / "other.h5", "secret", (4, 2))
    with h5py.File(path, "a") as opened:
        del opened["layers/dense/vars/0"]
        opened["layers/dense/vars"].create_virtual_dataset("0", layout)
    with pytest.raises(DataError, match=r"^layers/dense/vars/0 in a Keras file is a link or external data"):
        from_keras(path)


def test_a_group_that_holds_itself_is_refused(tmp_path: Path) -> None:
    path = unpack("gru", "h5", tmp_path)
    with h5py.File(path, "a") as opened:
        opened["layers/dense/vars/again"] = opened["layers"]
    with pytest.raises(DataError, match="occurs more than once in a Keras file"):
        from_keras(path)


@pytest.mark.parametrize(("name", "content"), [("none.keras", None), ("broken.keras", b"nothing")])
def test_a_keras_file_that_can_not_be_read_is_one_sentence(name: str, content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match="does not exist" if content is None else "is not a readable Keras model"):
        from_keras(tmp_path / name)


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        ([(3, 12), (4, 12), (12,)], "reset_after=False"),
        ([(2, 2, 2)], r"layer 0 can't begin with an array of shape \[2, 2, 2\]; use a .keras file"),
        ([], "has no layers to import"),
        (
            [(3, 16), (4, 16), (16,), (5, 2), (2,)],
            "layer 1 takes 5 features, but the layer before it, layer 0, outputs 4",
        ),
    ],
)
def test_arrays_of_unsupported_layers_are_refused(shapes: list[tuple[int, ...]], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        from_keras([np.zeros(shape, dtype=np.float32) for shape in shapes])


@pytest.mark.parametrize(
    ("shapes", "kinds"),
    [
        ([(3, 16), (4, 16), (4, 4)], ["LSTM", "Linear"]),
        ([(3, 12), (4, 12), (4, 6)], ["GRU", "Linear"]),
    ],
)
def test_a_kernel_with_as_many_elements_as_a_bias_is_not_a_bias(
    shapes: list[tuple[int, ...]], kinds: list[str]
) -> None:
    stack = from_keras([np.zeros(shape, dtype=np.float32) for shape in shapes])
    assert [type(block).__name__ for block in stack] == kinds


def test_without_h5py_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ConfigError, match=r"a Keras file needs h5py; pip install 'stretto\[keras\]'"):
        from_keras(tmp_path / "model.keras")


@pytest.mark.peers
def test_keras_still_gives_the_recorded_outputs(tmp_path: Path) -> None:
    python = os.environ.get("STRETTO_TENSORFLOW_PYTHON")
    if not python:
        pytest.skip("STRETTO_TENSORFLOW_PYTHON does not name a Python that has Keras 3")
    script = Path(__file__).with_name("record_keras.py")
    subprocess.run([python, str(script), str(tmp_path / "now.json")], check=True, capture_output=True, timeout=280)
    for name, model in json.loads((tmp_path / "now.json").read_text())["models"].items():
        assert np.allclose(model["outputs"], MODELS[name]["outputs"], rtol=1e-5, atol=1e-6)
        path = tmp_path / f"{name}.keras"
        path.write_bytes(zlib.decompress(base64.b64decode(model["keras"])))
        assert difference(from_keras(path), model) < 2e-6


def test_an_array_without_content_can_not_be_huge(tmp_path: Path) -> None:
    path = unpack("gru", "h5", tmp_path)
    with h5py.File(path, "a") as opened:
        del opened["layers/dense/vars/0"]
        opened["layers/dense/vars"].create_dataset("0", (1 << 20, 1 << 20), np.float32, chunks=True)
    for file in (path, in_archive(path, unpack("gru", "keras", tmp_path))):
        with pytest.raises(
            DataError, match=rf"the content of {file} would take 4,39\d,[\d,]+ bytes, more than the limit"
        ):
            from_keras(file)


def test_an_archive_that_expands_to_too_much_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = unpack("gru", "keras", tmp_path)
    with zipfile.ZipFile(path) as archive:
        config = archive.read("config.json")
    for files, error in (
        (
            {"config.json": config, "model.weights.h5": bytes(2 << 20)},
            r"would take 2,097,152 bytes, more than the limit",
        ),
        ({"config.json": b" " * (MAX_READ_BYTES + 1)}, r"config\.json in .*gru\.keras is larger than 128 MiB"),
        ({"config.json": b"[" * 100_000}, "it is nested too deeply"),
    ):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        monkeypatch.setattr(bounded_read, "_MIN_EXPANDED_BYTES", 1 << 20)
        with pytest.raises(DataError, match=error):
            from_keras(path)
