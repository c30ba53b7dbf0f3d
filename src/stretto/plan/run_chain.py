"""RunChain: the runs of blocks that every chunk passes, in the order of the model, and the stage that holds each.

Usually a stage holds one run. With `layout.interleave=2` it holds two (virtual stages), and a chunk passes the stages
twice. Here 2 stages of 4 blocks, plain and interleaved:

    stage 0  blocks 0-1          stage 0  block 0   block 2
    stage 1  blocks 2-3          stage 1  block 1   block 3

A block that looks ahead needs all chunks of a micro-batch at once: it is a run of its own, a whole run, which waits for
all chunks. The blocks before and after it on the same stage are runs that work on chunks:

    stage 0  blocks 0-1 | block 2 (looks ahead) | block 3
    stage 1  blocks 4-7
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from stretto.plan.actions import Action, ActionKind


@dataclass(frozen=True)
class RunChain:
    """The runs of one replica; `Action.run` is a run's index among those of its stage."""

    stages: tuple[int, ...]  # by run: the stage that holds it
    whole: tuple[bool, ...]  # by run: whether it takes all chunks of a micro-batch at once

    @classmethod
    def of(cls, num_stages: int, interleave: int = 1) -> "RunChain":
        """Return the chain of a causal model: `interleave` runs per stage, in rounds over the stages."""
        stages = tuple(range(num_stages)) * interleave
        return cls(stages, (False,) * len(stages))

    @cached_property
    def runs_of_stage(self) -> tuple[tuple[int, ...], ...]:
        """By stage: the numbers of its runs, in order."""
        return tuple(
            tuple(run for run, holder in enumerate(self.stages) if holder == stage)
            for stage in range(max(self.stages) + 1)
        )

    @cached_property
    def run_indices(self) -> tuple[int, ...]:
        """By run: its index among those of its stage."""
        return tuple(self.runs_of_stage[stage].index(run) for run, stage in enumerate(self.stages))

    @cached_property
    def has_whole(self) -> bool:
        """Whether a run takes all chunks of a micro-batch at once."""
        return any(self.whole)

    @property
    def num_stages(self) -> int:
        return len(self.runs_of_stage)

    @property
    def is_interleaved(self) -> bool:
        """Whether chunks come back to the first stage from the last one."""
        return any(after < before for before, after in pairwise(self.stages))

    def number(self, stage: int, action: Action) -> int:
        """Return the number of the run that an action of a stage works on."""
        return self.runs_of_stage[stage][action.run]

    def is_message(self, run: int) -> bool:
        """Return whether run `run` gets its inputs in messages of another stage, from the run before it."""
        return run > 0 and self.stages[run] != self.stages[run - 1]

    def is_edge_whole(self, run: int) -> bool:
        """Return whether run `run` gets a micro-batch from the run before it in one piece, and not in chunks."""
        return self.whole[run] and self.whole[run - 1]


@dataclass(frozen=True)
class ChainMessages:
    """What forwards and backwards of a chain send to each other; `chunk_counts` has the chunks of each micro-batch."""

    chain: RunChain
    chunk_counts: Sequence[int]

    def senders(self, action: Action, stage: int) -> Sequence[tuple[int, Action]]:
        """Return the (stage, action) pairs of other stages whose messages `action` waits for."""
        return self._neighbors(action, stage, -1 if action.kind is ActionKind.FORWARD else 1)

    def receivers(self, action: Action, stage: int) -> Sequence[tuple[int, Action]]:
        """Return the (stage, action) pairs of other stages that wait for a message of `action`."""
        return self._neighbors(action, stage, 1 if action.kind is ActionKind.FORWARD else -1)

    def dependencies(self, action: Action, stage: int) -> Iterator[tuple[int, Action]]:
        """Yield the (stage, action) pairs that must finish before `action` can run on `stage`."""
        yield from self.senders(action, stage)
        kind, micro_batch, chunk = action.kind, action.micro_batch, action.chunk
        number = self.chain.number(stage, action)
        is_forward = kind is ActionKind.FORWARD
        yield from self._related(action, number, -1 if is_forward else 1, is_same_stage=True)
        if not is_forward:
            yield stage, Action(ActionKind.FORWARD, micro_batch, chunk, action.run)
        earlier = chunk - 1 if is_forward else chunk + 1
        if not self.chain.whole[number] and 0 <= earlier < self.chunk_counts[micro_batch]:
            yield stage, Action(kind, micro_batch, earlier, action.run)

    def _neighbors(self, action: Action, stage: int, distance: int) -> Sequence[tuple[int, Action]]:
        chain, number = self.chain, self.chain.number(stage, action)
        if chain.has_whole:
            return tuple(self._related(action, number, distance, is_same_stage=False))
        # The usual case, which a simulation asks for often.
        other = number + distance
        if not 0 <= other < len(chain.stages) or chain.stages[other] == stage:
            return ()
        run = chain.run_indices[other]
        is_same = run == action.run
        return (
            (chain.stages[other], action if is_same else Action(action.kind, action.micro_batch, action.chunk, run)),
        )

    def _related(
        self, action: Action, number: int, distance: int, *, is_same_stage: bool
    ) -> Iterator[tuple[int, Action]]:
        """Yield the actions of the next or previous run on the same chunks, if that run is on the same stage or not."""
        chain, other = self.chain, number + distance
        if not 0 <= other < len(chain.stages) or (chain.stages[other] == chain.stages[number]) != is_same_stage:
            return
        if chain.whole[other]:
            chunks: Sequence[int] = (0,)
        elif chain.whole[number]:
            chunks = range(self.chunk_counts[action.micro_batch])
            chunks = chunks if action.kind is ActionKind.FORWARD else chunks[::-1]
        else:
            chunks = (action.chunk,)
        stage, run = chain.stages[other], chain.run_indices[other]
        for chunk in chunks:
            yield stage, Action(action.kind, action.micro_batch, chunk, run)


def cut_at_look_ahead(
    parts: Sequence[slice], looks_ahead: Sequence[bool], num_stages: int
) -> tuple[RunChain, list[slice]]:
    """Return the chain of the runs of all parts, and the blocks of each; `looks_ahead` is by block.

    Part i is on stage i mod `num_stages`. On the first stage, the blocks before one that looks ahead belong to its run:
    nobody waits for them. So do the blocks after it on the last stage.
    """
    stages: list[int] = []
    whole: list[bool] = []
    blocks: list[slice] = []
    for index, part in enumerate(parts):
        ahead = [block for block in range(part.start, part.stop) if looks_ahead[block]]
        start = part.start if not ahead or index == 0 else ahead[0]
        stop = part.stop if not ahead or index == len(parts) - 1 else ahead[-1] + 1
        for run in (slice(part.start, start), slice(start, stop), slice(stop, part.stop)):
            if run.stop > run.start:
                stages.append(index % num_stages)
                whole.append(bool(ahead) and run.start == start)
                blocks.append(run)
    return RunChain(tuple(stages), tuple(whole)), blocks
