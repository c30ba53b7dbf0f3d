"""Stack: a sequence of blocks, which is itself a block and can be sliced into stages."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from typing import cast, overload

import torch
from torch import Tensor, nn

from stretto.base.errors import ConfigError
from stretto.base.resets import Resets
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.block import Block
from stretto.blocks.vocab_embedding import SplitEmbedding
from stretto.blocks.vocab_shard import VocabShard


class Stack(Block):
    """Blocks that run in order, like `nn.Sequential`. Names use a block's index in the complete model, not in a stage.

    `stack[2:4]` shares blocks 2 and 3 with `stack` and keeps their names: `first`, the index of its first block, is 2.
    So names in checkpoints, and the random numbers derived from them, do not depend on which stage holds a block.

    `loss` is a loss that has weights (see `attach_loss`). It is not a block and does not run in `forward`; slices that
    end with the last block keep it.
    """

    def __init__(self, blocks: Iterable[Block], first: int = 0, loss: nn.Module | None = None) -> None:
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
        self.loss = loss
        self.causal = all(block.causal for block in block_list)
        self.stride = math.prod(block.stride for block in block_list)
        # The stack's state is one flat tuple; each slice selects the tensors of one block.
        tensor_counts = [len(block.initial_state(Rows.of(0))) for block in block_list]
        self._state_slices = [slice(start, stop) for start, stop in pairwise(accumulate(tensor_counts, initial=0))]
        # In a slice: the weights that are tied to one of a block before it. By name; the values are their first names.
        self._borrowed: dict[str, str] = {}
        self._shards: dict[int, VocabShard] = {}  # by the index of the block whose table is split
        self._model_dtype: torch.dtype | None = None  # in a slice: that of the complete model
        # Set by an engine with several stages, which trains only some of the complete model's blocks on this rank.
        self.is_split = False

    def __len__(self) -> int:
        return len(self._state_slices)

    def __iter__(self) -> Iterator[Block]:
        # Shards of other blocks come after the stack's own blocks, and don't run with them.
        return (cast(Block, block) for block in islice(self.blocks.values(), len(self)))

    @property
    def indices(self) -> list[int]:
        """The index of each block in the complete model."""
        return [int(name) for name in islice(self.blocks, len(self))]

    def add_shard(self, index: int, shard: VocabShard) -> None:
        """Hold some rows of the table of the model's block `index`, by the names that its weights have there.

        If the block is in this stack, it must be one that works on the shard's rows.
        """
        self._shards[index] = shard
        if str(index) in self.blocks:
            block = self.blocks[str(index)]
            assert isinstance(block, SplitEmbedding)
            block.module = shard.module
        else:
            self.blocks[str(index)] = shard

    def split_embedding(self) -> None:
        """Replace the first block, an embedding, with one that takes the vectors which all stages look up together."""
        self.blocks[str(self.first)] = SplitEmbedding(self[0])

    @property
    def shards(self) -> dict[int, VocabShard]:
        """The tables of which this stack holds some rows, by the index of the block in the complete model."""
        return self._shards

    def rows_of(self, name: str) -> tuple[int, int | None]:
        """Return the first row that this stack has of a weight, and the number in the complete model: None if all."""
        kind, index = name.split(".")[:2]
        shard = self._shards.get(int(index)) if kind == "blocks" else None
        return (0, None) if shard is None else (shard.rows.start, shard.num_table_rows)

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> "Stack": ...
    def __getitem__(self, index: int | slice) -> "Block | Stack":
        blocks = list(self)
        if isinstance(index, int):
            return blocks[index]
        start, stop, stride = index.indices(len(blocks))
        if stride != 1:
            raise ConfigError(f"a Stack can't be sliced with step {stride}; use step 1: stages are contiguous blocks")
        return self._share(Stack(blocks[index], self.first + start, self.loss if stop == len(blocks) else None))

    def join(self, parts: Sequence[slice]) -> "Stack":
        """Return one stack with the blocks of several slices, by their names in this one: a stage with several runs.

        It can't run if blocks are missing between them.
        """
        if len(parts) == 1:
            return self[parts[0]]
        indices, blocks = self.indices, list(self)
        selected = [position for part in parts for position in range(len(blocks))[part]]
        has_last = selected[-1] == len(blocks) - 1
        joined = Stack([blocks[position] for position in selected], self.first, self.loss if has_last else None)
        joined.first = indices[selected[0]]
        joined.blocks = nn.ModuleDict({str(indices[position]): blocks[position] for position in selected})
        return self._share(joined)

    def _share(self, part: "Stack") -> "Stack":
        """Return a stack of some of this one's blocks, with what it has to know of the others."""
        part.is_split = self.is_split
        part._model_dtype = self.dtype
        part._borrowed = {
            name: first_name
            for name, first_name in self.tied_names().items()
            if part.has_block_of(name) and not part.has_block_of(first_name)
        }
        return part

    def tied_names(self) -> dict[str, str]:
        """Return the first name, in the complete model, of each weight whose name is not its first one.

        If an output layer uses the weight of the embedding: `{"blocks.2.module.weight": "blocks.0.module.weight"}`.
        """
        first_names: dict[nn.Parameter, str] = {}
        tied = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            first_name = first_names.setdefault(parameter, self._borrowed.get(name, name))
            if first_name != name:
                tied[name] = first_name
        return tied

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name: a tied one once, by its first name in the complete model."""
        return {self._borrowed.get(name, name): parameter for name, parameter in self.named_parameters()}

    def named_tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers, as `state_dict` does, but a tied one once, by its first name."""
        tied = self.tied_names()
        return {tied.get(name, name): tensor for name, tensor in self.state_dict().items()}

    def owned_parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose first name is in this slice: over all slices of a model, each once."""
        return [parameter for name, parameter in self.named_parameters() if name not in self._borrowed]

    def has_block_of(self, name: str) -> bool:
        """Return whether a weight, `blocks.<index>.<name>` or `loss.<name>`, or a shard of it, is in this stack."""
        kind, index = name.split(".")[:2]
        return self.loss is not None if kind == "loss" else index in self.blocks

    def check_complete(self) -> None:
        """Raise if this rank has trained weights of only some blocks."""
        if self.is_split:
            raise ConfigError(
                "the model was trained in several stages, so this rank has the trained weights of its own stage only; "
                "use stretto.train.gather_model(engine, model), called on all ranks"
            )

    def initial_state(self, rows: Rows) -> State:
        return self.begin(rows)

    def begin(self, rows: Rows, carried: State | None = None) -> State:
        state: list[Tensor] = []
        for index, block, state_slice in zip(self.indices, self, self._state_slices, strict=True):
            state.extend(block.begin(rows.for_block(index), None if carried is None else carried[state_slice]))
            rows = rows.after_stride(block.stride)
        return tuple(state)

    def advance(self, state: State, num_steps: int) -> State | None:
        advanced: list[Tensor] = []
        for block, block_state in zip(self, self.split_state(state), strict=True):
            after = block.advance(block_state, num_steps)
            if after is None:
                return None
            advanced.extend(after)
            num_steps = -(-num_steps // block.stride)
        return tuple(advanced)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, and so of floating-point states; of a slice without weights, that of the model."""
        dtypes = (parameter.dtype for parameter in self.parameters() if parameter.is_floating_point())
        return next(dtypes, self._model_dtype or torch.get_default_dtype())

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

    def run_with_resets(self, x: Tensor, state: State, resets: Resets) -> tuple[Tensor, State]:
        new_state: list[Tensor] = []
        for index, (block, block_state) in enumerate(zip(self, self.split_state(state), strict=True), self.first):
            x, new_block_state = block.run_with_resets(x, block_state, resets.for_block(index))
            new_state.extend(new_block_state)
        return x, tuple(new_state)
