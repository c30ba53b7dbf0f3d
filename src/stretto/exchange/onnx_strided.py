"""Strided blocks as ONNX operators; each function returns the names of the output and of the next state tensors."""

import numpy as np

from stretto.blocks.strided import CausalConv, PoolTime, StackFrames
from stretto.exchange.onnx_graph import Graph


def add_stack_frames(graph: Graph, block: StackFrames, x: str, num_left: str) -> tuple[str, list[str]]:
    """Add a StackFrames: [groups, stride, rows, features] -> [groups, rows, stride * features]."""
    groups, _ = _add_groups(graph, x, num_left, block.stride)
    transposed = graph.add_node("Transpose", groups, perm=[0, 2, 1, 3])
    y = graph.add_node("Reshape", transposed, graph.add_int64_constant(0, 0, -1))
    return y, [_add_num_left(graph, x, num_left)]


def add_pool_time(graph: Graph, block: PoolTime, x: str, num_left: str) -> tuple[str, list[str]]:
    """Add a PoolTime: the mean or maximum over the valid time steps of each group."""
    fill = 0.0 if block.kind == "mean" else -float("inf")
    groups, is_valid = _add_groups(graph, x, num_left, block.stride, fill)
    axes = graph.add_int64_constant(1)
    counts = graph.add_node("ReduceSum", graph.add_node("CastLike", is_valid, x), axes, keepdims=0)
    if block.kind == "mean":
        total = graph.add_node("ReduceSum", groups, axes, keepdims=0)
        y = graph.add_node("Div", total, graph.add_node("Max", counts, _add_number(graph, 1.0)))
    else:
        zero = _add_number(graph, 0.0)
        maximum = graph.add_node("ReduceMax", groups, axes, keepdims=0)
        y = graph.add_node("Where", graph.add_node("Greater", counts, zero), maximum, zero)
    return y, [_add_num_left(graph, x, num_left)]


def add_causal_conv(graph: Graph, block: CausalConv, name: str, x: str, state: list[str]) -> tuple[str, list[str]]:
    """Add a CausalConv: a convolution of the inputs that the state holds and those of the chunk."""
    conv = block.conv
    *before, num_left = state
    groups, _ = _add_groups(graph, x, num_left, block.stride)
    # [groups, stride, rows, features] -> [groups * stride, rows, features]
    shape = graph.add_node(
        "Concat", graph.add_int64_constant(-1), graph.add_node("Shape", groups, start=2, end=4), axis=0
    )
    steps = graph.add_node("Reshape", groups, shape)
    kept = [graph.add_node("Transpose", name, perm=[1, 0, 2]) for name in before]
    inputs = graph.add_node("Concat", *kept, steps, axis=0)
    weights = [graph.add_initializer(f"{name}.conv.weight", conv.weight)]
    if conv.bias is not None:
        weights.append(graph.add_initializer(f"{name}.conv.bias", conv.bias))
    # [time, rows, features] -> [rows, features, time], and back
    y = graph.add_node("Conv", graph.add_node("Transpose", inputs, perm=[1, 2, 0]), *weights, strides=[block.stride])
    after = []
    if before:
        start, stop = graph.add_int64_constant(-block.num_kept), graph.add_int64_constant(2**62)
        last = graph.add_node("Slice", inputs, start, stop, graph.add_int64_constant(0))
        after = [graph.add_node("Transpose", last, perm=[1, 0, 2])]
    return graph.add_node("Transpose", y, perm=[2, 0, 1]), [*after, _add_num_left(graph, x, num_left)]


def _add_groups(graph: Graph, x: str, num_left: str, stride: int, fill: float = 0.0) -> tuple[str, str]:
    """Add the groups `[groups, stride, rows, features]`, padded with `fill`, and `[.., rows, 1]`: which are valid."""
    num_steps = graph.add_node("Shape", x, start=0, end=1)
    num_missing = graph.add_node("Mod", graph.add_node("Neg", num_steps), graph.add_int64_constant(stride))
    nothing = graph.add_int64_constant(0, 0)
    pads = graph.add_node("Concat", graph.add_int64_constant(0, 0, 0), num_missing, nothing, axis=0)
    padded = graph.add_node("Pad", x, pads)
    zero, one = (graph.add_node("Squeeze", graph.add_int64_constant(number)) for number in (0, 1))
    num_padded = graph.add_node("Squeeze", graph.add_node("Shape", padded, start=0, end=1))
    indices = graph.add_node("Unsqueeze", graph.add_node("Range", zero, num_padded, one), graph.add_int64_constant(1))
    is_valid = graph.add_node("Less", indices, graph.add_node("Min", num_left, num_steps))  # [time, rows]
    is_valid = graph.add_node("Unsqueeze", is_valid, graph.add_int64_constant(2))
    filled = graph.add_node("Where", is_valid, padded, _add_number(graph, fill))
    return _add_split(graph, filled, stride), _add_split(graph, is_valid, stride)


def _add_split(graph: Graph, x: str, stride: int) -> str:
    """Add a reshape of [time, rows, features] to [groups, stride, rows, features]."""
    rest = graph.add_node("Shape", x, start=1, end=3)
    return graph.add_node("Reshape", x, graph.add_node("Concat", graph.add_int64_constant(-1, stride), rest, axis=0))


def _add_num_left(graph: Graph, x: str, num_left: str) -> str:
    return graph.add_node("Sub", num_left, graph.add_node("Shape", x, start=0, end=1))


def _add_number(graph: Graph, number: float) -> str:
    return graph.add_constant(np.array(number, dtype=np.float32))
