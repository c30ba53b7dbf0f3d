"""find_sweeps: what a model's blocks pass from span to span, for plans with `layout.spans`."""

from stretto.base.errors import ConfigError
from stretto.base.window import Rows
from stretto.blocks.span_program import SpanProgram
from stretto.blocks.stack import Stack
from stretto.config.layout import Layout
from stretto.engine.build import check_spans
from stretto.engine.span_model import find_sweep_shapes
from stretto.plan.profile import SweepCosts


def find_span_obstacle(model: Stack) -> str | None:
    """Return why spans can't split a model that looks ahead; None if they can, or if the model is causal."""
    try:
        SpanProgram.of(model)
    except ConfigError as error:
        return None if model.causal else str(error)
    return None


def find_sweeps(model: Stack) -> tuple[SweepCosts, ...]:
    """Return the sweeps of all blocks in order; an empty tuple if the engine can't split the model over spans."""
    try:
        check_spans(model, Layout(spans=2))
    except ConfigError:
        return ()
    row = Rows.of(1, 1, device=model.device, dtype=model.dtype)
    sweeps: list[SweepCosts] = []
    for index in range(len(model)):
        # Layers are numbered block by block, so the program of each block by itself tells which of them are its own.
        block, first_layer = model[index : index + 1], 1 + max((sweep.layer for sweep in sweeps), default=-1)
        state = block.initial_state(row)
        program = SpanProgram.of(block)
        for sweep, shape in zip(program.sweeps, find_sweep_shapes(program), strict=True):
            num_bytes = sum(tensor.nbytes for tensor in sweep.initial_state(row, state))
            sweeps.append(
                SweepCosts(
                    block=index,
                    layer=first_layer + shape.layer,
                    is_reverse=shape.is_reverse,
                    state_bytes=num_bytes,
                    cost=shape.cost,
                    passes_state=shape.passes_state,
                )
            )
    return tuple(sweeps)
