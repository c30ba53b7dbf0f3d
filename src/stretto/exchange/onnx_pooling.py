"""Pooling blocks as ONNX operators; each function returns the names of the output and of the next state tensors."""

import torch

from stretto.exchange.onnx_graph import Graph


def add_mean_pool(graph: Graph, x: str, total: str, num_steps: str) -> tuple[str, list[str]]:
    """Add a MeanPool: running sums, divided by running counts."""
    totals = graph.add_node("Add", graph.add_node("CumSum", x, graph.add_int64_constant(0)), total)
    # [time, 1] + [rows] = [time, rows]
    window_steps = graph.add_node("Squeeze", graph.add_node("Shape", x, start=0, end=1))
    zero, one = (graph.add_node("Squeeze", graph.add_int64_constant(number)) for number in (0, 1))
    indices = graph.add_node("Range", zero, window_steps, one)
    offsets = graph.add_node("Unsqueeze", graph.add_node("Add", indices, one), graph.add_int64_constant(1))
    counts = graph.add_node("Add", offsets, num_steps)
    divisors = graph.add_node("CastLike", graph.add_node("Unsqueeze", counts, graph.add_int64_constant(2)), totals)
    return graph.add_node("Div", totals, divisors), [_last_step(graph, totals), _last_step(graph, counts)]


def add_max_pool(graph: Graph, label: str, x: str, maximum: str, has_started: str) -> tuple[str, list[str]]:
    """Add a MaxPool as a Scan over time, since ONNX has no cumulative maximum."""
    before = _where_started(graph, has_started, maximum, _first_step(graph, x))
    body = Graph(prefix=f"blocks.{label}.")
    maximum_before, step = f"blocks.{label}.maximum", f"blocks.{label}.x"  # the body's inputs at each step
    next_maximum = body.add_node("Max", maximum_before, step)
    # The maximum is both a loop state and an output at every step, and each of a body's outputs needs its own name.
    y = body.add_node("Identity", next_maximum)
    scan_body = body.scan_body([maximum_before, step], [next_maximum, y], torch.float32)
    last, maxima = graph.add_multi_output_node("Scan", 2, before, x, body=scan_body, num_scan_inputs=1)
    return maxima, [last, _all_true(graph, has_started)]


def add_final_states(graph: Graph, x: str, first: str, has_started: str) -> tuple[str, list[str]]:
    """Add a FinalStates: the forward half as it is, the backward half of the first time step."""
    forward, backward = graph.add_multi_output_node("Split", 2, x, axis=2, num_outputs=2)
    next_first = _where_started(graph, has_started, first, _first_step(graph, backward))
    expanded = graph.add_node("Expand", next_first, graph.add_node("Shape", backward))
    return graph.add_node("Concat", forward, expanded, axis=2), [next_first, _all_true(graph, has_started)]


def _where_started(graph: Graph, has_started: str, value: str, other: str) -> str:
    """Select `value` in the rows that have started, `other` in the others; both are [rows, features]."""
    return graph.add_node("Where", graph.add_node("Unsqueeze", has_started, graph.add_int64_constant(1)), value, other)


def _all_true(graph: Graph, has_started: str) -> str:
    return graph.add_node("Or", has_started, graph.add_node("Not", has_started))


def _first_step(graph: Graph, x: str) -> str:
    return graph.add_node("Gather", x, graph.add_node("Squeeze", graph.add_int64_constant(0)), axis=0)


def _last_step(graph: Graph, x: str) -> str:
    return graph.add_node("Gather", x, graph.add_node("Squeeze", graph.add_int64_constant(-1)), axis=0)
