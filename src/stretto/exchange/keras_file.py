"""Reads the layers of a Keras file in order, with their arrays; never runs code from the file."""

import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.base.bounded_read import check_expanded_size, parse_json, read_stream
from stretto.base.errors import ConfigError, DataError
from stretto.base.extras import import_optional_dependency
from stretto.base.reason import short_reason

Array = NDArray[Any]

_WEIGHTS_NAME = "model.weights.h5"
# A damaged archive raises one of these; RuntimeError also if its content is nested too deeply.
_ARCHIVE_ERRORS = (RuntimeError, EOFError, zipfile.BadZipFile, zlib.error)
# A .weights.h5 file does not say in which order layers of different classes run, or which layer a TimeDistributed
# wraps. So assume this order, and that a TimeDistributed wraps a Dense.
_LAYER_ORDER = {"embedding": 0, "bidirectional": 1, "lstm": 1, "gru": 1, "time_distributed": 2, "dense": 2}
_LAYER_CLASSES = {"embedding": "Embedding", "bidirectional": "Bidirectional", "lstm": "LSTM", "gru": "GRU"}
_LAYERS_WITHOUT_WEIGHTS = ("activation", "dropout", "input_layer", "masking", "spatial_dropout1d")


@dataclass(frozen=True)
class KerasLayer:
    """A layer of a Keras file: its class (`kind`), its config, and its arrays by the path of their sublayer."""

    name: str
    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, list[Array]] = field(default_factory=dict)


def read_keras(path: Path) -> list[KerasLayer]:
    """Return the layers of a `.keras` file, or of a `.weights.h5` file, whose layers get an empty config."""
    h5py = import_optional_dependency("h5py", "keras", "a Keras file")
    if not path.is_file():
        problem = "is not a file" if path.exists() else "does not exist"
        raise DataError(f"{path} {problem}; give a .keras or .weights.h5 file")
    try:
        if not zipfile.is_zipfile(path):
            with h5py.File(path, "r") as h5_file:
                _check_content(h5_file, path, h5py)
                return list(_read_weights_only(h5_file, path, h5py))
        with zipfile.ZipFile(path) as archive:
            with archive.open("config.json") as config_file:
                config = parse_json(read_stream(config_file, f"config.json in {path}"))
            check_expanded_size(path, archive.getinfo(_WEIGHTS_NAME).file_size)
            content = io.BytesIO(archive.read(_WEIGHTS_NAME))
        with h5py.File(content, "r") as h5_file:
            _check_content(h5_file, path, h5py)
            return list(_read_with_config(config, h5_file, h5py))
    except (OSError, KeyError, ValueError, TypeError, AttributeError, *_ARCHIVE_ERRORS) as error:
        raise DataError(f"{path} is not a readable Keras model ({short_reason(error)}); save it with Keras 3") from None


def _check_content(h5_file: Any, path: Path, h5py: Any) -> None:  # noqa: ANN401 - h5py has no types
    """Reject links and external data, which could make us read other files, cycles, and arrays that are too large."""
    seen: set[int] = set()
    num_bytes = 0  # of all arrays; the file may have them compressed, or only their sizes

    def visit(group: Any) -> None:  # noqa: ANN401
        nonlocal num_bytes
        for name in group:
            # Check the link itself first: `group[name]` would follow it.
            is_hard_link = isinstance(group.get(name, getlink=True), h5py.HardLink)
            item = group[name] if is_hard_link else None
            if item is None or (isinstance(item, h5py.Dataset) and (item.external or item.is_virtual)):
                item_path = f"{group.name}/{name}".lstrip("/")
                raise DataError(f"{item_path} in a Keras file is a link or external data; save all weights in the file")
            if isinstance(item, h5py.Dataset):
                num_bytes += item.nbytes
                check_expanded_size(path, num_bytes)
            if isinstance(item, h5py.Group):
                address = h5py.h5o.get_info(item.id).addr
                if address in seen:
                    raise DataError(f"{item.name} occurs more than once in a Keras file; save the model with Keras 3")
                seen.add(address)
                visit(item)

    seen.add(h5py.h5o.get_info(h5_file["/"].id).addr)
    visit(h5_file["/"])


def _read_with_config(config: dict[str, Any], h5_file: Any, h5py: Any) -> Iterator[KerasLayer]:  # noqa: ANN401
    kind = config["class_name"]
    if kind not in ("Sequential", "Functional", "Model"):
        raise ConfigError(f"the Keras model's class is {kind}; from_keras supports Sequential and Functional models")
    groups = {_layer_name(group, name): group for name, group in h5_file["layers"].items()}
    previous: str | None = None
    for layer in config["config"]["layers"]:
        name = layer["config"]["name"]
        if kind != "Sequential":
            _check_chain(layer, name, previous)
        previous = name
        arrays = _arrays(groups[name], h5py) if name in groups else {}
        yield KerasLayer(name, layer["class_name"], layer["config"], arrays)


def _check_chain(layer: dict[str, Any], name: str, previous: str | None) -> None:
    """Raise ConfigError unless a layer's only input is the previous layer, or the layer is the model's InputLayer."""
    # Each input tensor in the config names the layer that outputs it, as `"keras_history": ["lstm", 0, 0]`.
    sources = set(re.findall(r'"keras_history": \["([^"]+)"', json.dumps(layer.get("inbound_nodes", []))))
    is_first = layer["class_name"] == "InputLayer" and previous is None
    if not is_first and sources != {previous}:
        raise ConfigError(
            f"the inputs of the Keras layer {name} are {sorted(sources)}; from_keras supports models whose layers run "
            "one after the other"
        )


def _read_weights_only(h5_file: Any, path: Path, h5py: Any) -> Iterator[KerasLayer]:  # noqa: ANN401
    layers: list[tuple[int, int, str, str]] = []  # (usual position, number, class as in `_LAYER_ORDER`, group's name)
    for name in h5_file["layers"]:
        kind = re.sub(r"_\d+$", "", name)
        if kind in _LAYERS_WITHOUT_WEIGHTS:
            continue
        number = int(name.removeprefix(f"{kind}_")) if name != kind else 0
        layers.append((_LAYER_ORDER.get(kind, -1), number, kind, name))
    for position, same_position in groupby(sorted(layers), key=itemgetter(0)):
        kinds = sorted({kind for _, _, kind, _ in same_position})
        if position < 0 or len(kinds) > 1:
            raise ConfigError(
                f"{path} holds weights of {' and '.join(kinds)}, but not the layers' order; save the model as .keras"
            )
    for _, _, kind, name in sorted(layers):
        group = h5_file["layers"][name]
        yield KerasLayer(_layer_name(group, name), _LAYER_CLASSES.get(kind, "Dense"), {}, _arrays(group, h5py))


def _layer_name(group: Any, name: str) -> str:  # noqa: ANN401 - h5py has no types
    """Return a layer's name in the user's model; the file's groups have names such as `lstm_1`."""
    return str(group["vars"].attrs.get("name", name) if "vars" in group else name)


def _arrays(group: Any, h5py: Any) -> dict[str, list[Array]]:  # noqa: ANN401 - h5py has no types
    """Return a layer's arrays by the path of their sublayer: "" (the layer itself), `cell`, `forward_layer/cell`."""
    arrays: dict[str, dict[int, Array]] = {}

    def visit(path: str) -> None:
        item = group[path]
        folder, _, number = path.rpartition("/")
        if isinstance(item, h5py.Group):
            for name in item:
                visit(f"{path}/{name}")
        elif folder.endswith("vars") and number.isdecimal():
            arrays.setdefault(folder.removesuffix("vars").rstrip("/"), {})[int(number)] = np.asarray(item)

    for name in group:
        visit(name)
    return {sublayer: [numbered[index] for index in sorted(numbered)] for sublayer, numbered in arrays.items()}
