"""Blocks that stretto can't translate to ONNX, such as custom ones: torch's exporter translates them."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from stretto.base.errors import ConfigError
from stretto.base.extras import import_optional_dependency
from stretto.base.reason import class_and_reason
from stretto.base.state import State
from stretto.base.tf32 import use_tf32
from stretto.blocks.block import Block
from stretto.exchange.onnx_graph import OPSET, Graph


class _FlatOutputs(nn.Module):
    """A wrapper around a block, for torch's exporter: its forward returns a flat tuple `(y, *state)`."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, ...]:
        y, next_state = self.block(x, state)
        return y, *next_state


def add_custom_block(
    graph: Graph, block: Block, label: str, inputs: tuple[str, ...], example: tuple[Tensor, ...]
) -> tuple[str, list[str]]:
    """Add any block; return the names of its output and of its next state tensors. `example` has a value per input."""
    onnx = import_optional_dependency("onnx", "onnx", "an export to ONNX")
    import_optional_dependency("onnxscript", "onnx", f"an export of block {label} ({type(block).__name__}) to ONNX")
    for submodule in ("onnx.compose", "onnx.inliner"):  # `import onnx` doesn't load all submodules
        import_optional_dependency(submodule, "onnx", "an export to ONNX")
    dynamic = torch.export.Dim.DYNAMIC  # dimensions 0 and 1 of x are time steps and rows; 0 of a state is rows
    try:
        # torch's exporter reads a flag of an older API, which raises an error if TF32 is off in the new one.
        with _quiet(), use_tf32(True):
            program = torch.onnx.export(
                _FlatOutputs(block).eval(),
                (example[0], example[1:]),
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                dynamic_shapes=({0: dynamic, 1: dynamic}, tuple({0: dynamic} for _ in example[1:])),
            )
        assert program is not None
        model = onnx.inliner.inline_local_functions(program.model_proto)
    except Exception as error:  # noqa: BLE001 - whatever the user's code or the exporter raises
        reason = class_and_reason(error.__cause__ or error)
        raise ConfigError(
            f"block {label} ({type(block).__name__}) can't be exported to ONNX ({reason}); its forward must consist of "
            "torch operators that work for any number of time steps and rows"
        ) from None
    subgraph = onnx.compose.add_prefix(model, f"blocks.{label}.").graph
    for value, name in zip(subgraph.input, inputs, strict=True):
        graph.nodes.append(onnx.helper.make_node("Identity", [name], [value.name]))
    graph.nodes += subgraph.node
    graph.initializers += subgraph.initializer
    y, *next_state = (value.name for value in subgraph.output)
    return y, next_state


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporter's warnings, logs and output; `compare_with_onnxruntime` checks the exported model."""
    disabled_level = logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled_level)
