"""StageRun: one run of blocks of a stage, and its place in the chain of runs that every chunk passes."""

import math

from stretto.base.window import Rows
from stretto.blocks.fused import FusedStack
from stretto.blocks.stack import Stack
from stretto.engine.cut import WindowCut
from stretto.plan.run_chain import RunChain


class StageRun:
    """The blocks of a run; most stages have one run. `number` is the run's in the chain.

    `model` is the whole model: the strides of the blocks before this run say how many time steps its inputs have.
    """

    def __init__(self, stack: Stack, number: int, *, chain: RunChain, model: Stack) -> None:
        self.stack = stack
        self.fused_stack = FusedStack(stack)
        self.chain = chain
        self.number = number
        self.is_whole = chain.whole[number]  # whether it takes all chunks of a micro-batch at once
        self.is_first, self.is_last = number == 0, number == len(chain.stages) - 1
        # Whether inputs and outputs are messages from and to other stages.
        self.receives = chain.is_message(number)
        self.sends = not self.is_last and chain.is_message(number + 1)
        # How many time steps of a window make one of this run's inputs, and one of its outputs.
        before = list(model)[: stack.first - model.first]
        self.input_stride = math.prod(block.stride for block in before)
        self.output_stride = self.input_stride * stack.stride
        self.num_state_tensors = len(stack.initial_state(Rows.of(0)))

    def cuts(self, cut: WindowCut) -> tuple[WindowCut, WindowCut]:
        """Return the cuts of this run's inputs and outputs, given that of the window."""
        cut = cut.whole() if self.is_whole else cut
        return cut.after_stride(self.input_stride), cut.after_stride(self.output_stride)

    def edge_cut(self, cut: WindowCut) -> WindowCut:
        """Return the cut of what the run before this one hands over, given that of the window."""
        cut = cut.whole() if self.chain.is_edge_whole(self.number) else cut
        return cut.after_stride(self.input_stride)
