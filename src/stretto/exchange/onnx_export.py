"""export_onnx: write a stack as an ONNX model with named states, for any number of time steps and rows."""

import copy
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.base.disk import explain_write_errors
from stretto.base.errors import ConfigError
from stretto.base.extras import import_optional_dependency
from stretto.base.task import Task
from stretto.base.version import installed_version
from stretto.blocks.head_loss import check_has_output_layer
from stretto.blocks.input_spec import InputSpec, find_input_spec
from stretto.blocks.stack import Stack
from stretto.blocks.standardize import Standardize
from stretto.exchange.onnx_blocks import add_block
from stretto.exchange.onnx_check import compare_with_onnxruntime
from stretto.exchange.onnx_decoding import decoding_metadata
from stretto.exchange.onnx_graph import Graph

# Weights of more than this in total go into a separate file; it is half of protobuf's limit of 2 GiB per message.
MAX_INLINE_BYTES = 1 << 30
TOLERANCE = 1e-5  # the largest difference that is accepted, as defined in `compare_with_onnxruntime`


class _HasTask(Protocol):
    @property
    def task(self) -> Task: ...


class ExportableModel(Protocol):
    """A stack with its task and metadata, such as the model that `stretto.load_model` returns."""

    @property
    def stack(self) -> Stack: ...
    @property
    def raw_stack(self) -> Stack:
        """The stack with a first block that scales raw values, if its inputs are channels."""

    @property
    def data_spec(self) -> _HasTask: ...
    def metadata(self) -> dict[str, str]:
        """Return what the inputs and outputs mean (vocabulary, labels, channels), each as JSON."""


@dataclass(frozen=True)
class OnnxExport:
    """An exported model and the names of its inputs and outputs; without onnxruntime, `max_difference` is None."""

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    max_difference: float | None  # between onnxruntime's and torch's outputs or states; relative for values above 1
    decoding: str | None = None  # what the caller does with `y`: `ctc` or `crf`; None if `y` needs no decoding


def export_onnx(model: Stack | ExportableModel, path: Path | str, *, example: Tensor | None = None) -> OnnxExport:
    """Write a stack as an ONNX model; check it with onnxruntime if it is installed.

    The inputs are `x` and the state of each block (`state.2.h` for block 2). The outputs are `y` and the states after
    the last time step (`state.2.h.next`). `x` and `y` are `[time, rows, ...]`, states `[rows, ...]`; token ids and the
    `lengths` in the state of a bidirectional block are int64, the rest is float32 (custom blocks choose their dtypes).
    The numbers of time steps and rows are dynamic. A model from `stretto.load_model` that predicts labels from channels
    takes raw values, NaN where missing, and scales them; one that forecasts takes and gives scaled values. If `model`
    is a stack that begins with a custom block or an activation, pass an `example` input `[time, rows, ...]`.

    `y` are scores also if the model was trained with CTC or a CRF: the caller decodes them, with the blank or the
    transitions in the metadata `stretto.decoding`.
    """
    exportable = None if isinstance(model, Stack) else model
    original = model if isinstance(model, Stack) else _stack_to_export(model)
    original.check_complete()
    check_has_output_layer(original.loss)
    if any(parameter.is_meta for parameter in original.parameters()):
        raise ConfigError("the stack's weights are on the meta device; create them with stretto.nn.initialize")
    stack = copy.deepcopy(original).cpu().float().eval()
    takes_raw_values = isinstance(stack[0], Standardize)
    task = None if exportable is None or takes_raw_values else exportable.data_spec.task
    input_spec = find_input_spec(stack, task, example)
    with torch.no_grad():
        graph = _build_graph(stack, input_spec)
    metadata = {"version": installed_version(), "causal": str(stack.causal).lower()}
    if exportable is not None:
        metadata |= exportable.metadata() | {"raw_inputs": str(takes_raw_values).lower()}
    trained = model if isinstance(model, Stack) else model.stack
    decoding = decoding_metadata(trained, None if exportable is None else exportable.data_spec.task)
    if decoding is not None:
        metadata["decoding"] = json.dumps(decoding)
    path = Path(path)
    proto = graph.to_model({f"stretto.{name}": text for name, text in metadata.items()})
    with _staged_file(path) as staged:
        _save_model(proto, staged)
        max_difference = compare_with_onnxruntime(stack, staged, input_spec)
        # NaN must fail too, and `NaN > TOLERANCE` is false.
        if max_difference is not None and not max_difference <= TOLERANCE:
            raise ConfigError(
                f"the exported model's results differ from torch's by {max_difference:.1e}, so {path} was not written; "
                "a custom block may depend on more than its input and its state"
            )
        _move_model(staged, path)
    inputs, outputs = ((value.name for value in values) for values in (graph.inputs, graph.outputs))
    return OnnxExport(
        path, tuple(inputs), tuple(outputs), max_difference, None if decoding is None else decoding["kind"]
    )


def _stack_to_export(model: ExportableModel) -> Stack:
    """Return the stack for raw values, except for forecasts: their outputs are scaled too, so their inputs stay so."""
    return model.raw_stack if model.data_spec.task.targets != "horizon" else model.stack


def _build_graph(stack: Stack, input_spec: InputSpec) -> Graph:
    graph = Graph()
    example = input_spec.random_input(num_steps=5, num_rows=3, generator=torch.Generator().manual_seed(0))
    x = graph.add_input("x", example.dtype, ["time", "rows", *example.shape[2:]])
    y, y_example = add_block(graph, stack, x, example)
    time = "time" if stack.stride == 1 else "outputs"
    graph.add_output("y", y, y_example.dtype, [time, "rows", *y_example.shape[2:]])
    # `add_block` has already added the next states as outputs; put `y` before them.
    graph.outputs.insert(0, graph.outputs.pop())
    return graph


@contextmanager
def _staged_file(path: Path) -> Iterator[Path]:
    """Yield a path with the same file name in a temporary folder beside `path`.

    `atomic_path` would change the name, and a large model contains the name of its weights file, derived from its own.
    """
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            yield Path(folder) / path.name


def _save_model(model: Any, path: Path) -> None:  # noqa: ANN401 - onnx has no types
    if sum(len(initializer.raw_data) for initializer in model.graph.initializer) > MAX_INLINE_BYTES:
        onnx = import_optional_dependency("onnx", "onnx", "an export to ONNX")
        onnx.save_model(model, path, save_as_external_data=True, location=_external_data_path(path).name)
    else:
        path.write_bytes(model.SerializeToString())


def _move_model(source: Path, path: Path) -> None:
    """Move a model and its weights file, if it has one; remove the weights file of a model that it replaces."""
    if _external_data_path(source).exists():
        _external_data_path(source).replace(_external_data_path(path))
        source.replace(path)
    else:
        source.replace(path)
        _external_data_path(path).unlink(missing_ok=True)


def _external_data_path(path: Path) -> Path:
    """Return the path of the file that holds a large model's weights."""
    return path.with_name(f"{path.name}.data")
