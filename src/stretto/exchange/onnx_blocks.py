"""Blocks as ONNX operators, with their state as inputs and outputs.

Torch's exporter fixes the number of steps of stacked cells and does not support projections. So our own blocks are
translated here, and only custom blocks go through torch's exporter.
"""

from collections.abc import Iterator
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from stretto.base.window import Rows
from stretto.blocks.bidirectional import BidirectionalLSTM
from stretto.blocks.block import Block
from stretto.blocks.dropout import Dropout, LockedDropout
from stretto.blocks.pointwise import Pointwise
from stretto.blocks.recurrent import GRU, LSTM
from stretto.blocks.residual import Residual
from stretto.blocks.stack import Stack
from stretto.exchange.onnx_custom import add_custom_block
from stretto.exchange.onnx_graph import Graph

Module = TypeVar("Module", bound=nn.Module)

# Torch has the gates i f g o (LSTM) and r z n (GRU); ONNX has i o f c and z r h.
_GATES = {nn.LSTM: (0, 3, 1, 2), nn.GRU: (1, 0, 2)}


def enumerate_blocks(stack: Stack, label: str) -> Iterator[tuple[str, Block]]:
    """Yield the blocks of a stack with their absolute index, prefixed by that of the enclosing stack."""
    return ((f"{label}.{index}".lstrip("."), block) for index, block in enumerate(stack, stack.first))


def has_forward_of(module: object, *kinds: type[Module]) -> TypeGuard[Module]:
    """Is a module of one of these classes, or of a subclass that does not override `forward`?"""
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)


def state_names(block: Block, label: str = "") -> list[str | None]:
    """Return the name of each state tensor in the ONNX model; None for state that only training needs."""
    if has_forward_of(block, Stack):
        return [name for index, inner in enumerate_blocks(block, label) for name in state_names(inner, index)]
    if has_forward_of(block, Residual):
        return state_names(block.block, label)
    size = len(block.initial_state(Rows.of(1)))
    if has_forward_of(block, Dropout, LockedDropout):
        return [None] * size
    kinds: dict[type[Block], list[str]] = {LSTM: ["h", "c"], GRU: ["h"], BidirectionalLSTM: ["lengths"]}
    matches = [names for kind, names in kinds.items() if has_forward_of(block, kind)]
    return [f"state.{label}.{name}" for name in (matches[0] if matches else range(size))]


def add_block(graph: Graph, block: Block, x: str, example: Tensor, label: str = "") -> tuple[str, Tensor]:
    """Add a block to a graph; return the name of its output, and its output for an example."""
    if has_forward_of(block, Stack):
        for index, inner in enumerate_blocks(block, label):
            x, example = add_block(graph, inner, x, example, index)
        return x, example
    if has_forward_of(block, Residual):
        y, y_example = add_block(graph, block.block, x, example, label)
        return graph.node("Add", x, y), example + y_example
    state = block.initial_state(Rows.of(example.shape[1], dtype=torch.float32))
    names = state_names(block, label)
    named = [(name, tensor) for name, tensor in zip(names, state, strict=True) if name]
    inputs = [graph.input(name, tensor, ["rows", *tensor.shape[1:]]) for name, tensor in named]
    y, afters = _add_leaf_block(graph, block, label, (x, *inputs), (example, *state))
    for name, tensor, after in zip(names, state, afters, strict=False):
        graph.output(f"{name}.after", after, tensor, ["rows", *tensor.shape[1:]])
    return y, block(example, state)[0]


def _add_leaf_block(
    graph: Graph, block: Block, label: str, inputs: tuple[str, ...], example: tuple[Tensor, ...]
) -> tuple[str, list[str]]:
    """Add a block that contains no other block; return the names of its output and of its state after the last step."""
    x, *state = inputs
    if has_forward_of(block, Dropout, LockedDropout):
        return x, []
    if has_forward_of(block, LSTM) or has_forward_of(block, GRU):
        return _add_cell(graph, block.cell, label, x, state)
    if has_forward_of(block, BidirectionalLSTM):
        return _add_bidirectional(graph, block.cell, label, x, state[0]), state
    if has_forward_of(block, Pointwise):
        y = _add_module(graph, block.module, f"blocks.{label}.module", x)
        if y is not None:
            return y, []
    return add_custom_block(graph, block, label, inputs, example)


def _add_module(graph: Graph, module: nn.Module, name: str, x: str) -> str | None:
    """Add a pointwise module; None if it is not one of the common ones."""
    if has_forward_of(module, nn.Embedding):
        return graph.node("Gather", graph.weight(f"{name}.weight", module.weight), x)
    if has_forward_of(module, nn.Linear):
        y = graph.node("MatMul", x, graph.weight(f"{name}.weight", module.weight.T))
        bias = _bias(graph, module, name)
        return graph.node("Add", y, *bias) if bias else y
    if has_forward_of(module, nn.LayerNorm) and module.elementwise_affine:
        weight = graph.weight(f"{name}.weight", module.weight)
        axis = -len(module.normalized_shape)
        return graph.node("LayerNormalization", x, weight, *_bias(graph, module, name), axis=axis, epsilon=module.eps)
    if isinstance(module, nn.Softmax) and module.dim == -1:
        return graph.node("Softmax", x, axis=-1)
    plain = {nn.ReLU: "Relu", nn.Tanh: "Tanh", nn.Sigmoid: "Sigmoid", nn.Identity: "Identity", nn.Dropout: "Identity"}
    return graph.node(plain[type(module)], x) if type(module) in plain else None


def _bias(graph: Graph, module: nn.Module, name: str) -> list[str]:
    bias = module.state_dict().get("bias")
    return [] if bias is None else [graph.weight(f"{name}.bias", bias)]


def _add_cell(graph: Graph, cell: nn.LSTM | nn.GRU, label: str, x: str, state: list[str]) -> tuple[str, list[str]]:
    """Add the layers of a cell in order, each with its part of the state."""
    num_layers = cell.num_layers
    # [rows, layers, features] -> for each layer [1, rows, features]
    transposed = [graph.node("Transpose", name, perm=[1, 0, 2]) for name in state]
    parts = [
        graph.multi_output_node("Split", num_layers, name, axis=0, num_outputs=num_layers) if num_layers > 1 else [name]
        for name in transposed
    ]
    afters: list[list[str]] = []
    for layer, layer_state in enumerate(zip(*parts, strict=True)):
        name = f"blocks.{label}.cell.l{layer}"
        if cell.proj_size:
            x, after = _add_projected_lstm(graph, cell, layer, name, x, layer_state)
        else:
            operator = "LSTM" if isinstance(cell, nn.LSTM) else "GRU"
            # Torch and cuDNN apply the reset gate after the matrix product with the hidden state.
            gru_attributes = {"linear_before_reset": 1} if operator == "GRU" else {}
            inputs = [x, *_cell_weights(graph, cell, [f"l{layer}"], name), "", *layer_state]
            y, *after = graph.multi_output_node(
                operator, 1 + len(layer_state), *inputs, hidden_size=cell.hidden_size, **gru_attributes
            )
            # [time, 1, rows, features]
            x = graph.node("Squeeze", y, graph.int64_constant(1))
        afters.append(after)
    joined = [
        graph.node("Concat", *layers, axis=0) if num_layers > 1 else layers[0] for layers in zip(*afters, strict=True)
    ]
    return x, [graph.node("Transpose", name, perm=[1, 0, 2]) for name in joined]


def _cell_weights(graph: Graph, cell: nn.LSTM | nn.GRU, layers: list[str], name: str) -> list[str]:
    """Add the weights of a layer, in one or two directions; return the names of kernel, recurrent kernel and bias."""
    gates = _GATES[nn.LSTM if isinstance(cell, nn.LSTM) else nn.GRU]

    def ordered(kind: str) -> Tensor:
        """[directions, gates * hidden, ...]"""
        directions = [getattr(cell, f"{kind}_{layer}").detach().chunk(len(gates)) for layer in layers]
        return torch.stack([torch.cat([chunks[gate] for gate in gates]) for chunks in directions])

    kernels = [graph.weight(f"{name}.{kind}", ordered(kind)) for kind in ("weight_ih", "weight_hh")]
    if not cell.bias:
        return [*kernels, ""]
    return [*kernels, graph.weight(f"{name}.bias", torch.cat([ordered("bias_ih"), ordered("bias_hh")], dim=1))]


def _add_bidirectional(graph: Graph, cell: nn.LSTM, label: str, x: str, lengths: str) -> str:
    """Add a bidirectional cell; the backward direction starts at the last valid step of each row."""
    num_steps = graph.node("Shape", x, start=0, end=1)
    clamped = graph.node("Min", graph.node("Max", lengths, graph.int64_constant(1)), num_steps)
    ends = graph.node("Cast", clamped, to=graph.int32)
    for layer in range(cell.num_layers):
        weights = _cell_weights(graph, cell, [f"l{layer}", f"l{layer}_reverse"], f"blocks.{label}.cell.l{layer}")
        y = graph.node("LSTM", x, *weights, ends, hidden_size=cell.hidden_size, direction="bidirectional")
        # [time, 2, rows, features] -> [time, rows, 2 * features]
        transposed = graph.node("Transpose", y, perm=[0, 2, 1, 3])
        x = graph.node("Reshape", transposed, graph.int64_constant(0, 0, 2 * cell.hidden_size))
    return x


def _add_projected_lstm(
    graph: Graph, cell: nn.RNNBase, layer: int, name: str, x: str, state: tuple[str, ...]
) -> tuple[str, list[str]]:
    """Add one layer of an LSTM with a projection as a loop over time; ONNX has no operator for it."""

    def weight(kind: str) -> Tensor:
        tensor: Tensor = getattr(cell, f"{kind}_l{layer}").detach()
        return tensor

    kernel, recurrent, projection = (
        graph.weight(f"{name}.{kind}", weight(kind).T) for kind in ("weight_ih", "weight_hh", "weight_hr")
    )
    # The part that does not depend on the state is computed for all steps at once.
    gates = graph.node("MatMul", x, kernel)
    if cell.bias:
        gates = graph.node("Add", gates, graph.weight(f"{name}.bias", weight("bias_ih") + weight("bias_hh")))
    body = Graph(prefix=f"{name}.")
    h, c, x_gates = (f"{name}.{part}" for part in ("h", "c", "gates"))
    all_gates = body.node("Add", x_gates, body.node("MatMul", h, recurrent))
    i, f, g, o = body.multi_output_node("Split", 4, all_gates, axis=-1, num_outputs=4)
    i, f, o = (body.node("Sigmoid", gate) for gate in (i, f, o))
    c_after = body.node("Add", body.node("Mul", f, c), body.node("Mul", i, body.node("Tanh", g)))
    h_after = body.node("MatMul", body.node("Mul", o, body.node("Tanh", c_after)), projection)
    y = body.node("Identity", h_after)
    loop = body.loop_body([h, c, x_gates], [h_after, c_after, y], weight("weight_hr"))
    first = graph.int64_constant(0)
    initial = [graph.node("Squeeze", part, first) for part in state]
    *afters, outputs = graph.multi_output_node("Scan", 3, *initial, gates, body=loop, num_scan_inputs=1)
    return outputs, [graph.node("Unsqueeze", after, first) for after in afters]
