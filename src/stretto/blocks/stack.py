"""Stack: a sequence of blocks, which is itself a block and can be sliced into stages."""

from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import cast, overload

import torch
from torch import Tensor, nn

from stretto.base.errors import ConfigError
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.block import Block


class Stack(Block):
    """Blocks that run in order, like `nn.Sequential`. Names use a block's index in the complete model, not in a stage.

    `stack[2:4]` shares blocks 2 and 3 with `stack` and keeps their names: `first`, the index of its first block, is 2.
    So names in checkpoints, and the random numbers derived from them, do not depend on which stage holds a block.
    """

    def __init__(self, blocks: Iterable[Block], first: int = 0) -> None:
        super().__init__()
        block_list = list(blocks)
        if not block_list:
            raise ConfigError("a Stack has no blocks; give it at least one block")
        for index, block in enumerate(block_list, first):
            if not isinstance(block, Block):
                raise ConfigError(
                    f"block {index} is of type {type(block).__name__}, not a stretto.nn.Block; wrap a module that "
                    "treats each time step independently in stretto.nn.Pointwise, or subclass stretto.nn.Block"
                )
        self.first = first
        self.blocks = nn.ModuleDict({str(index): block for index, block in enumerate(block_list, first)})
        self.causal = all(block.causal for block in block_list)
        # The stack's state is one flat tuple; each slice selects the tensors of one block.
        tensor_counts = [len(block.initial_state(Rows.of(0))) for block in block_list]
        self._state_slices = [slice(start, stop) for start, stop in pairwise(accumulate(tensor_counts, initial=0))]

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Block]:
        return (cast(Block, block) for block in self.blocks.values())

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> "Stack": ...
    def __getitem__(self, index: int | slice) -> "Block | Stack":
        blocks = list(self)
        if isinstance(index, int):
            return blocks[index]
        start, _, stride = index.indices(len(blocks))
        if stride != 1:
            raise ConfigError(f"a Stack can't be sliced with step {stride}; use step 1: stages are contiguous blocks")
        return Stack(blocks[index], self.first + start)

    def initial_state(self, rows: Rows) -> State:
        return self.begin(rows)

    def begin(self, rows: Rows, carried: State | None = None) -> State:
        state: list[Tensor] = []
        for index, (block, state_slice) in enumerate(zip(self, self._state_slices, strict=True), self.first):
            state.extend(block.begin(rows.for_block(index), None if carried is None else carried[state_slice]))
        return tuple(state)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, and so of floating-point states."""
        dtypes = (parameter.dtype for parameter in self.parameters() if parameter.is_floating_point())
        return next(dtypes, torch.get_default_dtype())

    @property
    def device(self) -> torch.device:
        """The device of the weights; the CPU for a stack without weights."""
        return next((parameter.device for parameter in self.parameters()), torch.device("cpu"))

    def split_state(self, state: State) -> list[State]:
        """Return the state of each block from the stack's flat state."""
        return [state[state_slice] for state_slice in self._state_slices]

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        new_state: list[Tensor] = []
        for block, block_state in zip(self, self.split_state(state), strict=True):
            x, new_block_state = block(x, block_state)
            new_state.extend(new_block_state)
        return x, tuple(new_state)
