"""Minimal cells and those of the xLSTM as ONNX operators, with a Scan over time; each returns output and next state."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from stretto.blocks.matrix_lstm import MLSTM
from stretto.blocks.minimal import MinGRU, MinimalCell
from stretto.blocks.scalar_lstm import SLSTM
from stretto.exchange.onnx_graph import Graph


def add_minimal_cell(graph: Graph, block: MinimalCell, label: str, x: str, h: str) -> tuple[str, list[str]]:
    """Add a MinGRU or MinLSTM: the gates of all time steps at once, and `h = decay * h + added` as a Scan."""
    maps = _add_linear(graph, block.inputs, f"blocks.{label}.inputs", x)
    if isinstance(block, MinGRU):
        z, candidate = graph.add_multi_output_node("Split", 2, maps, axis=2, num_outputs=2)
        gate = graph.add_node("Neg", z)
    else:
        f, i, candidate = graph.add_multi_output_node("Split", 3, maps, axis=2, num_outputs=3)
        gate = graph.add_node("Sub", _add_log_sigmoid(graph, f), _add_log_sigmoid(graph, i))
    added = graph.add_node("Mul", graph.add_node("Sigmoid", graph.add_node("Neg", gate)), candidate)

    def step(body: Graph, state: list[str], inputs: list[str]) -> tuple[str, list[str]]:
        decay_t, added_t = inputs
        next_h = body.add_node("Add", body.add_node("Mul", decay_t, state[0]), added_t)
        return next_h, [next_h]

    return _add_scan(graph, label, [h], [graph.add_node("Sigmoid", gate), added], step)


def add_slstm(graph: Graph, block: SLSTM, label: str, x: str, state: list[str]) -> tuple[str, list[str]]:
    """Add an SLSTM. Within the Scan, states are `[heads, rows, features]`."""
    name, heads = f"blocks.{label}", block.num_heads
    weight = graph.add_initializer(f"{name}.weight_hh", block.weight_hh)
    maps = _add_linear(graph, block.inputs, f"{name}.inputs", x)
    # [time, rows, heads * 4 * features] -> [time, heads, rows, 4 * features]
    split = graph.add_node("Reshape", maps, graph.add_int64_constant(0, 0, heads, -1))
    gates = graph.add_node("Transpose", split, perm=[0, 2, 1, 3])
    by_head = [graph.add_node("Reshape", tensor, graph.add_int64_constant(0, heads, -1)) for tensor in state]
    h, c, n, m = (graph.add_node("Transpose", tensor, perm=[1, 0, 2]) for tensor in by_head)
    # As in the block: before a row's first time step, there is nothing to scale.
    zero, lowest = (graph.add_constant(np.array(number, dtype=np.float32)) for number in (0.0, -3e38))
    m = graph.add_node("Where", graph.add_node("Equal", n, zero), lowest, m)

    def step(body: Graph, state: list[str], inputs: list[str]) -> tuple[str, list[str]]:
        h, c, n, m = state
        raw = body.add_node("Add", inputs[0], body.add_node("MatMul", h, weight))
        i, f, z, o = body.add_multi_output_node("Split", 4, raw, axis=-1, num_outputs=4)
        log_f = body.add_node("Add", _add_log_sigmoid(body, f), m)
        next_m = body.add_node("Max", i, log_f)
        i, f = (body.add_node("Exp", body.add_node("Sub", gate, next_m)) for gate in (i, log_f))
        next_c = body.add_node("Add", body.add_node("Mul", f, c), body.add_node("Mul", i, body.add_node("Tanh", z)))
        next_n = body.add_node("Add", body.add_node("Mul", f, n), i)
        normalized = body.add_node("Div", next_c, next_n)
        next_h = body.add_node("Mul", body.add_node("Sigmoid", o), normalized)
        return next_h, [next_h, next_c, next_n, next_m]

    y, after = _add_scan(graph, label, [h, c, n, m], [gates], step)
    flat = [graph.add_node("Transpose", tensor, perm=[1, 0, 2]) for tensor in after]
    next_state = [graph.add_node("Reshape", tensor, graph.add_int64_constant(0, block.hidden_size)) for tensor in flat]
    # [time, heads, rows, features] -> [time, rows, hidden]
    transposed = graph.add_node("Transpose", y, perm=[0, 2, 1, 3])
    return graph.add_node("Reshape", transposed, graph.add_int64_constant(0, 0, block.hidden_size)), next_state


def add_mlstm(graph: Graph, block: MLSTM, label: str, x: str, state: list[str]) -> tuple[str, list[str]]:
    """Add an MLSTM, step by step. Within the Scan, queries are `[rows, heads, 1, features]`, gates `[rows, heads]`."""
    name, heads = f"blocks.{label}", block.num_heads
    maps = _add_linear(graph, block.inputs, f"{name}.inputs", x)
    *parts, output_gate = graph.add_multi_output_node("Split", 4, maps, axis=2, num_outputs=4)
    shape = graph.add_int64_constant(0, 0, heads, 1, block.head_size)
    query, key, value = (graph.add_node("Reshape", part, shape) for part in parts)
    key = graph.add_node("Mul", key, graph.add_constant(np.array(block.head_size**-0.5, dtype=np.float32)))
    gates = _add_linear(graph, block.gates, f"{name}.gates", x)
    input_gate, forget_gate = graph.add_multi_output_node("Split", 2, gates, axis=2, num_outputs=2)
    axis2, axis23 = graph.add_int64_constant(2), graph.add_int64_constant(2, 3)

    def step(body: Graph, state: list[str], inputs: list[str]) -> tuple[str, list[str]]:
        (c, n, m), (q, k, v, i, log_f) = state, inputs
        kept = body.add_node("Add", log_f, m)
        next_m = body.add_node("Max", kept, i)
        i, f = (body.add_node("Exp", body.add_node("Sub", gate, next_m)) for gate in (i, kept))
        i4, f4 = (body.add_node("Unsqueeze", gate, axis23) for gate in (i, f))  # [rows, heads, 1, 1]
        weighted_k = body.add_node("Mul", i4, k)
        outer = body.add_node("MatMul", body.add_node("Transpose", weighted_k, perm=[0, 1, 3, 2]), v)
        next_c = body.add_node("Add", body.add_node("Mul", f4, c), outer)
        kept_n = body.add_node("Mul", body.add_node("Unsqueeze", f, axis2), n)
        next_n = body.add_node("Add", kept_n, body.add_node("Squeeze", weighted_k, axis2))
        # [rows, heads, 1, features] @ [rows, heads, features, 1]
        norm = body.add_node("Abs", body.add_node("MatMul", q, body.add_node("Unsqueeze", next_n, axis3)))
        one = body.add_node("Exp", body.add_node("Clip", body.add_node("Neg", next_m), lowest, highest))
        divisor = body.add_node("Max", norm, body.add_node("Unsqueeze", one, axis23))
        return body.add_node("Div", body.add_node("MatMul", q, next_c), divisor), [next_c, next_n, next_m]

    axis3 = graph.add_int64_constant(3)
    lowest, highest = (graph.add_constant(np.array(number, dtype=np.float32)) for number in (-60.0, 60.0))
    scanned = [query, key, value, input_gate, _add_log_sigmoid(graph, forget_gate)]
    values, after = _add_scan(graph, label, state, scanned, step)
    flat = graph.add_node("Reshape", values, graph.add_int64_constant(0, 0, block.hidden_size))
    return graph.add_node("Mul", graph.add_node("Sigmoid", output_gate), flat), after


Step = Callable[[Graph, list[str], list[str]], tuple[str, list[str]]]
"""Adds one time step to a Scan's body, given the names of the state and the inputs; returns output and next state."""


def _add_scan(
    graph: Graph, label: str, state: Sequence[str], inputs: Sequence[str], step: Step
) -> tuple[str, list[str]]:
    """Add a Scan over the first dimension of the inputs; return the names of all outputs and of the last state."""
    body = Graph(prefix=f"blocks.{label}.")
    names = [f"blocks.{label}.state_{index}" for index in range(len(state))]
    input_names = [f"blocks.{label}.input_{index}" for index in range(len(inputs))]
    y, next_state = step(body, names, input_names)
    # Each of a body's outputs needs a name of its own.
    outputs = [body.add_node("Identity", name) for name in (*next_state, y)]
    scan_body = body.scan_body([*names, *input_names], outputs, torch.float32)
    *after, y = graph.add_multi_output_node(
        "Scan", len(outputs), *state, *inputs, body=scan_body, num_scan_inputs=len(inputs)
    )
    return y, after


def _add_linear(graph: Graph, linear: torch.nn.Linear, name: str, x: str) -> str:
    y = graph.add_node("MatMul", x, graph.add_initializer(f"{name}.weight", linear.weight.T))
    bias = linear.state_dict().get("bias")
    return y if bias is None else graph.add_node("Add", y, graph.add_initializer(f"{name}.bias", bias))


def _add_log_sigmoid(graph: Graph, x: str) -> str:
    """Add `-softplus(-x)`, with operators that don't overflow: `min(x, 0) - log(1 + exp(-|x|))`."""
    softplus = graph.add_node("Softplus", graph.add_node("Neg", graph.add_node("Abs", x)))
    negative = graph.add_node("Neg", graph.add_node("Relu", graph.add_node("Neg", x)))
    return graph.add_node("Sub", negative, softplus)
