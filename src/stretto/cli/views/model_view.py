"""show_model: prints the model that a config describes, with the part of it that each stage holds."""

from stretto.base.position import Position
from stretto.blocks.summary import summarize
from stretto.cli.views.console import make_console
from stretto.config.run import RunConfig
from stretto.engine.build import stage_parts
from stretto.engine.engine import window_tensor
from stretto.train.build import build_inputs


def show_model(config: RunConfig) -> None:
    """Print a table of the blocks; nothing is computed, but the data is opened for the sizes of inputs and outputs."""
    console = make_console()
    inputs = build_inputs(config)
    task = inputs.train.data_spec.task
    window = inputs.train.windows.read(Position(), targets=False)
    summary = summarize(inputs.model, window_tensor(window, "inputs", inputs.model.dtype))
    num_codes = sum(len(category.inputs) for category in task.categories)
    categories = f" ({num_codes:,} of them categories)" if num_codes else ""
    console.print(f"inputs   {task.num_inputs:,} {task.inputs}{categories}, from {config.data.source}", soft_wrap=True)
    console.print(f"targets  {task.targets}, {task.num_outputs:,} outputs", soft_wrap=True)
    console.print(str(summary), soft_wrap=True)
    if config.layout.stages > 1:
        parts = stage_parts(inputs.model, config.layout)
        for stage in range(config.layout.stages):
            own = parts[stage :: config.layout.stages]  # several with layout.interleave
            cost = sum(block.cost for part in own for block in summary.blocks[part])
            blocks = " and ".join(map(_describe_part, own))
            console.print(f"stage {stage}: {blocks}, {cost:.1%} of the cost")


def _describe_part(part: slice) -> str:
    return f"block {part.start}" if part.stop - part.start == 1 else f"blocks {part.start} to {part.stop - 1}"
