"""A stack as an ONNX model: state goes in and comes out by name, for any number of steps and rows."""

import copy
import importlib.metadata
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.extras import import_optional_dependency
from stretto.base.task import Task
from stretto.blocks.stack import Stack
from stretto.exchange.input_spec import InputSpec, input_spec_from_example, input_spec_from_stack, input_spec_from_task
from stretto.exchange.onnx_blocks import add_block
from stretto.exchange.onnx_check import compare_with_onnxruntime
from stretto.exchange.onnx_graph import Graph

# Beyond this many bytes of weights they go into a file beside the model: a message of protobuf ends at 2 GB.
MAX_INLINE_BYTES = 1 << 30
TOLERANCE = 1e-5


class _HasTask(Protocol):
    @property
    def task(self) -> Task: ...


class ExportableModel(Protocol):
    """A stack that knows what its numbers mean, such as what `stretto.load_model` returns."""

    @property
    def stack(self) -> Stack: ...
    @property
    def data_spec(self) -> _HasTask: ...
    def metadata(self) -> dict[str, str]:
        """Return the names behind the numbers, each as JSON."""


@dataclass(frozen=True)
class OnnxExport:
    """A model that was written, and how far its results are from torch's; none if there was no onnxruntime to ask."""

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    max_difference: float | None


def export_onnx(model: Stack | ExportableModel, path: Path | str, *, example: Tensor | None = None) -> OnnxExport:
    """Write a stack as an ONNX model, and check it with onnxruntime if that is there.

    It takes `x` and each block's state (`state.2.h`, by absolute index), and gives `y` and the states after
    (`state.2.h.after`), in float32, time-major, for any number of steps and rows. An `example`, `[time, rows, ...]`,
    says what goes in where the first block is one of your own.
    """
    exportable = None if isinstance(model, Stack) else model
    original = model if isinstance(model, Stack) else model.stack
    if any(parameter.is_meta for parameter in original.parameters()):
        raise ConfigError("the stack's weights are on the meta device, so there is nothing to export; initialize it")
    stack = copy.deepcopy(original).cpu().float().eval()
    input_spec = _input_spec(stack, exportable, example)
    metadata = {} if exportable is None else exportable.metadata()
    with torch.no_grad():
        graph = _build_graph(stack, input_spec)
    metadata = {"version": _version(), "causal": str(stack.causal).lower(), **metadata}
    path = Path(path)
    proto = graph.model({f"stretto.{name}": text for name, text in metadata.items()})
    with _staged_file(path) as beside:
        _save_model(proto, beside)
        max_difference = compare_with_onnxruntime(stack, beside, input_spec)
        if max_difference is not None and not max_difference <= TOLERANCE:
            raise ConfigError(
                f"the exported model differs from torch's by {max_difference:.1e}, so {path} was not kept; a block of your "
                "own may depend on more than its input and its state"
            )
        _replace(path, beside)
    inputs, outputs = ((value.name for value in values) for values in (graph.inputs, graph.outputs))
    return OnnxExport(path, tuple(inputs), tuple(outputs), max_difference)


def _build_graph(stack: Stack, input_spec: InputSpec) -> Graph:
    graph = Graph()
    example = input_spec.random_input(5, 3, torch.Generator().manual_seed(0))
    x = graph.input("x", example, ["time", "rows", *example.shape[2:]])
    y, y_example = add_block(graph, stack, x, example)
    graph.output("y", y, y_example, ["time", "rows", *y_example.shape[2:]])
    # First what everyone wants.
    graph.outputs.insert(0, graph.outputs.pop())
    return graph


def _input_spec(stack: Stack, exportable: ExportableModel | None, example: Tensor | None) -> InputSpec:
    if example is not None:
        return input_spec_from_example(example)
    return input_spec_from_stack(stack) if exportable is None else input_spec_from_task(exportable.data_spec.task)


@contextmanager
def _staged_file(path: Path) -> Iterator[Path]:
    """Give a file of the same name in a folder beside it, so that what is there stays until the new one is good."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            yield Path(folder) / path.name
    except OSError as error:
        raise ConfigError(f"{path} can't be written ({error.strerror}); choose another file") from None


def _save_model(model: Any, path: Path) -> None:  # noqa: ANN401 - onnx has no types
    if sum(len(weight.raw_data) for weight in model.graph.initializer) > MAX_INLINE_BYTES:
        onnx = import_optional_dependency("onnx", "onnx", "an export to ONNX")
        onnx.save_model(model, path, save_as_external_data=True, location=_external_data_path(path).name)
    else:
        path.write_bytes(model.SerializeToString())


def _replace(path: Path, new: Path) -> None:
    if _external_data_path(new).exists():
        _external_data_path(new).replace(_external_data_path(path))
        new.replace(path)
    else:
        new.replace(path)
        _external_data_path(path).unlink(missing_ok=True)


def _external_data_path(path: Path) -> Path:
    """Where the weights of a large model are."""
    return path.with_name(f"{path.name}.data")


def _version() -> str:
    try:
        return importlib.metadata.version("stretto")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
