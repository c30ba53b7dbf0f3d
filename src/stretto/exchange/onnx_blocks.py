"""Blocks as ONNX operators, with their state as inputs and outputs.

Torch's exporter fixes the number of time steps of a multi-layer LSTM and does not support `proj_size`. So stretto's own
blocks are translated here. Custom blocks, and modules that `_add_module` can't translate, go through torch's exporter.
"""

from collections.abc import Iterator
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from stretto.base.window import Rows
from stretto.blocks.activation_penalty import ActivationPenalty
from stretto.blocks.bidirectional import Bidirectional
from stretto.blocks.block import Block
from stretto.blocks.dropout import Dropout, LockedDropout
from stretto.blocks.embed_categories import EmbedCategories
from stretto.blocks.matrix_lstm import MLSTM
from stretto.blocks.minimal import MinGRU, MinLSTM
from stretto.blocks.pointwise import Pointwise
from stretto.blocks.pooling import FinalStates, MaxPool, MeanPool
from stretto.blocks.recurrent import GRU, LSTM
from stretto.blocks.residual import Residual
from stretto.blocks.scalar_lstm import SLSTM
from stretto.blocks.stack import Stack
from stretto.blocks.standardize import Standardize
from stretto.blocks.strided import CausalConv, PoolTime, StackFrames
from stretto.blocks.weight_drop import WeightDropLSTM, WordDropEmbedding
from stretto.exchange.onnx_cells import add_minimal_cell, add_mlstm, add_slstm
from stretto.exchange.onnx_custom import add_custom_block
from stretto.exchange.onnx_graph import Graph
from stretto.exchange.onnx_pooling import add_final_states, add_max_pool, add_mean_pool
from stretto.exchange.onnx_strided import add_causal_conv, add_pool_time, add_stack_frames

Module = TypeVar("Module", bound=nn.Module)

# Torch stores the gates as i f g o (LSTM) and r z n (GRU), ONNX as i o f c and z r h (its c is torch's g, its h is n).
_ONNX_GATE_ORDER = {nn.LSTM: (0, 3, 1, 2), nn.GRU: (1, 0, 2)}


def enumerate_blocks(stack: Stack, label: str) -> Iterator[tuple[str, Block]]:
    """Yield (label, block) pairs. A label is the block's path of indices: `2`, or `2.0` in the inner stack `2`."""
    return ((f"{label}.{index}".lstrip("."), block) for index, block in enumerate(stack, stack.first))


def has_forward_of(module: object, *kinds: type[Module]) -> TypeGuard[Module]:
    """Return whether a module is one of these classes, or a subclass that inherits `forward`: it computes the same."""
    return any(isinstance(module, kind) and _evaluated_forward(module) is kind.forward for kind in kinds)


def _evaluated_forward(module: nn.Module) -> object:
    """Return the `forward` that computes what a module computes in evaluations."""
    if type(module) is WeightDropLSTM:
        return LSTM.forward
    return Pointwise.forward if type(module) is WordDropEmbedding else type(module).forward


def state_names(block: Block, label: str = "") -> list[str | None]:
    """Return the ONNX name of each of a block's state tensors; None for state that only training needs."""
    if has_forward_of(block, Stack):
        return [name for path, inner in enumerate_blocks(block, label) for name in state_names(inner, path)]
    if has_forward_of(block, Residual):
        return state_names(block.block, label)
    num_tensors = len(block.initial_state(Rows.of(1)))
    if has_forward_of(block, Dropout, LockedDropout, ActivationPenalty) or isinstance(block, WordDropEmbedding):
        return [None] * num_tensors
    names_by_class: dict[type[Block], list[str]] = {
        LSTM: ["h", "c"],
        GRU: ["h"],
        MinGRU: ["h"],
        MinLSTM: ["h"],
        MLSTM: ["c", "n", "m"],
        SLSTM: ["h", "c", "n", "m"],
        Bidirectional: ["lengths"],
        MeanPool: ["total", "num_steps"],
        MaxPool: ["maximum", "has_started"],
        FinalStates: ["first", "has_started"],
        StackFrames: ["num_left"],
        PoolTime: ["num_left"],
        CausalConv: ["before", "num_left"],
    }
    matches = [names for kind, names in names_by_class.items() if has_forward_of(block, kind)]
    names = [f"state.{label}.{name}" for name in (matches[0][-num_tensors:] if matches else range(num_tensors))]
    return [*names, *[None] * (num_tensors - len(names))]  # dropped weights need a key in training


def add_block(graph: Graph, block: Block, x: str, example: Tensor, label: str = "") -> tuple[str, Tensor]:
    """Add a block whose input is the value named `x`; return its output's name, and its output for `example`."""
    if has_forward_of(block, Stack):
        for path, inner in enumerate_blocks(block, label):
            x, example = add_block(graph, inner, x, example, path)
        return x, example
    if has_forward_of(block, Residual):
        y, y_example = add_block(graph, block.block, x, example, label)
        return graph.add_node("Add", x, y), example + y_example
    state = block.initial_state(Rows.of(example.shape[1], dtype=torch.float32))
    names = state_names(block, label)
    named_state = [(name, tensor) for name, tensor in zip(names, state, strict=True) if name]
    inputs = [graph.add_input(name, tensor.dtype, ["rows", *tensor.shape[1:]]) for name, tensor in named_state]
    y, next_state = _add_leaf_block(graph, block, label, (x, *inputs), (example, *state))
    for (name, tensor), next_name in zip(named_state, next_state, strict=True):
        graph.add_output(f"{name}.next", next_name, tensor.dtype, ["rows", *tensor.shape[1:]])
    return y, block(example, state)[0]


def _add_leaf_block(
    graph: Graph, block: Block, label: str, inputs: tuple[str, ...], example: tuple[Tensor, ...]
) -> tuple[str, list[str]]:
    """Add a block other than a plain Stack or Residual; return the names of its output and its next state tensors."""
    x, *state = inputs
    if has_forward_of(block, Dropout, LockedDropout, ActivationPenalty):
        return x, []
    if has_forward_of(block, LSTM) or has_forward_of(block, GRU):
        return _add_rnn(graph, block.cell, label, x, state)
    if has_forward_of(block, MinGRU) or has_forward_of(block, MinLSTM):
        return add_minimal_cell(graph, block, label, x, *state)
    if has_forward_of(block, MLSTM):
        return add_mlstm(graph, block, label, x, state)
    if has_forward_of(block, SLSTM):
        return add_slstm(graph, block, label, x, state)
    if has_forward_of(block, Bidirectional):
        return _add_bidirectional(graph, block.cell, label, x, state[0]), state
    if has_forward_of(block, MeanPool):
        return add_mean_pool(graph, x, *state)
    if has_forward_of(block, MaxPool):
        return add_max_pool(graph, label, x, *state)
    if has_forward_of(block, FinalStates):
        return add_final_states(graph, x, *state)
    if has_forward_of(block, StackFrames):
        return add_stack_frames(graph, block, x, *state)
    if has_forward_of(block, PoolTime):
        return add_pool_time(graph, block, x, *state)
    if has_forward_of(block, CausalConv):
        return add_causal_conv(graph, block, f"blocks.{label}", x, state)
    if has_forward_of(block, Standardize):
        return _add_standardize(graph, block, f"blocks.{label}", x), []
    if has_forward_of(block, EmbedCategories):
        return _add_embed_categories(graph, block, f"blocks.{label}", x), []
    if has_forward_of(block, Pointwise):
        y = _add_module(graph, block.module, f"blocks.{label}.module", x)
        if y is not None:
            return y, []
    return add_custom_block(graph, block, label, inputs, example)


def _add_module(graph: Graph, module: nn.Module, name: str, x: str) -> str | None:
    """Add a pointwise module and return its output's name; None if stretto can't translate it."""
    if has_forward_of(module, nn.Embedding):
        return graph.add_node("Gather", graph.add_initializer(f"{name}.weight", module.weight), x)
    if has_forward_of(module, nn.Linear):
        y = graph.add_node("MatMul", x, graph.add_initializer(f"{name}.weight", module.weight.T))
        bias = _add_bias(graph, module, name)
        return graph.add_node("Add", y, bias) if bias else y
    if has_forward_of(module, nn.LayerNorm) and module.elementwise_affine:
        weight = graph.add_initializer(f"{name}.weight", module.weight)
        bias = _add_bias(graph, module, name)
        # ONNX allows "" for a missing bias, but onnxruntime crashes on it here.
        inputs = (x, weight, bias) if bias else (x, weight)
        return graph.add_node("LayerNormalization", *inputs, axis=-len(module.normalized_shape), epsilon=module.eps)
    if has_forward_of(module, nn.Softmax) and module.dim == -1:
        return graph.add_node("Softmax", x, axis=-1)
    ops = {nn.ReLU: "Relu", nn.Tanh: "Tanh", nn.Sigmoid: "Sigmoid", nn.Identity: "Identity", nn.Dropout: "Identity"}
    return graph.add_node(ops[type(module)], x) if type(module) in ops else None


def _add_standardize(graph: Graph, block: Standardize, name: str, x: str) -> str:
    mean, std = (graph.add_initializer(f"{name}.{key}", torch.tensor(getattr(block, key))) for key in ("mean", "std"))
    zero, one = (graph.add_initializer(f"{name}.{value}", torch.tensor(float(value))) for value in (0, 1))
    is_missing = graph.add_node("IsNaN", x)
    scaled = graph.add_node("Where", is_missing, zero, graph.add_node("Div", graph.add_node("Sub", x, mean), std))
    if not block.masks:
        return scaled
    return graph.add_node("Concat", scaled, graph.add_node("Where", is_missing, zero, one), axis=-1)


def _add_embed_categories(graph: Graph, block: EmbedCategories, name: str, x: str) -> str:
    """Add a lookup per category; what is not a code, such as NaN, is code 0."""
    zero, one = (graph.add_initializer(f"{name}.{value}", torch.tensor(float(value))) for value in (0, 1))
    parts = [graph.add_node("Gather", x, graph.add_int64_constant(*block.numbers), axis=-1)] if block.numbers else []
    for index, (category, table) in enumerate(zip(block.categories, block.tables, strict=True)):
        last = graph.add_initializer(f"{name}.{index}.last", torch.tensor(float(category.num_names)))
        weight = graph.add_initializer(f"{name}.tables.{index}.weight", table.state_dict()["weight"])
        values = graph.add_node(
            "Round", graph.add_node("Gather", x, graph.add_int64_constant(*category.inputs), axis=-1)
        )
        is_code = graph.add_node(
            "And", graph.add_node("GreaterOrEqual", values, one), graph.add_node("LessOrEqual", values, last)
        )
        codes = graph.add_node("Cast", graph.add_node("Where", is_code, values, zero), to=graph.int64)
        width = len(category.inputs) * table.state_dict()["weight"].shape[1]
        # [time, rows, inputs, features] -> [time, rows, inputs * features]
        parts.append(
            graph.add_node("Reshape", graph.add_node("Gather", weight, codes), graph.add_int64_constant(0, 0, width))
        )
    return graph.add_node("Concat", *parts, axis=-1)


def _add_bias(graph: Graph, module: nn.Module, name: str) -> str | None:
    """Add a module's bias and return its name; None if it has none."""
    bias = module.state_dict().get("bias")
    return None if bias is None else graph.add_initializer(f"{name}.bias", bias)


def _add_rnn(graph: Graph, rnn: nn.LSTM | nn.GRU, label: str, x: str, state: list[str]) -> tuple[str, list[str]]:
    """Add the layers of an LSTM or GRU; return the names of the output and of the next state tensors."""
    num_layers = rnn.num_layers
    # [rows, layers, features] -> for each layer [1, rows, features]
    transposed = [graph.add_node("Transpose", name, perm=[1, 0, 2]) for name in state]
    if num_layers > 1:
        options = {"axis": 0, "num_outputs": num_layers}
        parts = [graph.add_multi_output_node("Split", num_layers, name, **options) for name in transposed]
    else:
        parts = [[name] for name in transposed]
    next_states: list[list[str]] = []
    for layer, layer_state in enumerate(zip(*parts, strict=True)):
        name = f"blocks.{label}.cell.l{layer}"
        if rnn.proj_size:
            x, next_state = _add_projected_lstm(graph, rnn, layer, name, x, layer_state)
        else:
            op_type, attributes = _operator(rnn)
            inputs = [x, *_add_rnn_weights(graph, rnn, [f"l{layer}"], name), "", *layer_state]  # "": no sequence_lens
            y, *next_state = graph.add_multi_output_node(
                op_type, 1 + len(layer_state), *inputs, hidden_size=rnn.hidden_size, **attributes
            )
            # [time, 1, rows, features] -> [time, rows, features]
            x = graph.add_node("Squeeze", y, graph.add_int64_constant(1))
        next_states.append(next_state)
    stacked = [
        graph.add_node("Concat", *names, axis=0) if num_layers > 1 else names[0]
        for names in zip(*next_states, strict=True)
    ]
    return x, [graph.add_node("Transpose", name, perm=[1, 0, 2]) for name in stacked]


def _operator(rnn: nn.LSTM | nn.GRU) -> tuple[str, dict[str, int]]:
    """Return the ONNX operator of a cell, and its attributes."""
    # Torch and cuDNN apply a GRU's reset gate after the matrix product with the hidden state.
    return ("LSTM", {}) if isinstance(rnn, nn.LSTM) else ("GRU", {"linear_before_reset": 1})


def _add_rnn_weights(graph: Graph, rnn: nn.LSTM | nn.GRU, suffixes: list[str], name: str) -> list[str]:
    """Add a layer's weights, one suffix (`l0`, `l0_reverse`) per direction; return the names of ONNX's W, R and B."""
    gate_order = _ONNX_GATE_ORDER[nn.LSTM if isinstance(rnn, nn.LSTM) else nn.GRU]

    def reordered(kind: str) -> Tensor:
        """Return `[directions, gates * hidden, ...]` with the gates in ONNX's order."""
        directions = [getattr(rnn, f"{kind}_{suffix}").detach().chunk(len(gate_order)) for suffix in suffixes]
        return torch.stack([torch.cat([gates[index] for index in gate_order]) for gates in directions])

    w, r = (graph.add_initializer(f"{name}.{kind}", reordered(kind)) for kind in ("weight_ih", "weight_hh"))
    if not rnn.bias:
        return [w, r, ""]  # an empty name: no B
    bias = torch.cat([reordered("bias_ih"), reordered("bias_hh")], dim=1)
    return [w, r, graph.add_initializer(f"{name}.bias", bias)]


def _add_bidirectional(graph: Graph, rnn: nn.LSTM | nn.GRU, label: str, x: str, lengths: str) -> str:
    """Add a bidirectional cell whose reverse direction starts at a row's last valid step; return its output's name."""
    # Clamp as the block's forward does; the length of a row that doesn't end would also overflow an int32.
    num_steps = graph.add_node("Shape", x, start=0, end=1)
    clamped = graph.add_node("Min", graph.add_node("Max", lengths, graph.add_int64_constant(1)), num_steps)
    sequence_lens = graph.add_node("Cast", clamped, to=graph.int32)
    for layer in range(rnn.num_layers):
        weights = _add_rnn_weights(graph, rnn, [f"l{layer}", f"l{layer}_reverse"], f"blocks.{label}.cell.l{layer}")
        op_type, attributes = _operator(rnn)
        y = graph.add_node(
            op_type, x, *weights, sequence_lens, hidden_size=rnn.hidden_size, direction="bidirectional", **attributes
        )
        # [time, 2, rows, features] -> [time, rows, 2 * features]; a 0 in the shape of a Reshape keeps a dimension.
        transposed = graph.add_node("Transpose", y, perm=[0, 2, 1, 3])
        x = graph.add_node("Reshape", transposed, graph.add_int64_constant(0, 0, 2 * rnn.hidden_size))
    return x


def _add_projected_lstm(
    graph: Graph, rnn: nn.RNNBase, layer: int, name: str, x: str, state: tuple[str, ...]
) -> tuple[str, list[str]]:
    """Add one layer of an LSTM with `proj_size` as a Scan over time, since ONNX's LSTM has no projection."""

    def weight(kind: str) -> Tensor:
        tensor: Tensor = getattr(rnn, f"{kind}_l{layer}").detach()
        return tensor

    weight_ih, weight_hh, weight_hr = (
        graph.add_initializer(f"{name}.{kind}", weight(kind).T) for kind in ("weight_ih", "weight_hh", "weight_hr")
    )
    # The part of the gates that does not depend on the state is computed for all steps at once.
    gates = graph.add_node("MatMul", x, weight_ih)
    if rnn.bias:
        bias = graph.add_initializer(f"{name}.bias", weight("bias_ih") + weight("bias_hh"))
        gates = graph.add_node("Add", gates, bias)
    body = Graph(prefix=f"{name}.")
    h, c, x_gates = (f"{name}.{part}" for part in ("h", "c", "gates"))  # the body's inputs at each step
    all_gates = body.add_node("Add", x_gates, body.add_node("MatMul", h, weight_hh))
    i, f, g, o = body.add_multi_output_node("Split", 4, all_gates, axis=-1, num_outputs=4)
    i, f, o = (body.add_node("Sigmoid", gate) for gate in (i, f, o))
    next_c = body.add_node("Add", body.add_node("Mul", f, c), body.add_node("Mul", i, body.add_node("Tanh", g)))
    next_h = body.add_node("MatMul", body.add_node("Mul", o, body.add_node("Tanh", next_c)), weight_hr)
    # h is both a loop state and an output at every step, and each of a body's outputs needs its own name.
    y = body.add_node("Identity", next_h)
    scan_body = body.scan_body([h, c, x_gates], [next_h, next_c, y], torch.float32)
    axis0 = graph.add_int64_constant(0)
    inputs = [*(graph.add_node("Squeeze", name, axis0) for name in state), gates]
    *next_state, outputs = graph.add_multi_output_node("Scan", 3, *inputs, body=scan_body, num_scan_inputs=1)
    return outputs, [graph.add_node("Unsqueeze", name, axis0) for name in next_state]
