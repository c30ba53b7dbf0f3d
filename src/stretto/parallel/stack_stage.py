"""StackStage: some blocks of a Stack over a chunk of packed rows, with the weights of one call."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from stretto.base.state import State, where_rows
from stretto.base.window import Rows
from stretto.blocks.block import Block
from stretto.blocks.residual import Residual
from stretto.parallel.layers import CallRows, LayerStage
from stretto.parallel.rnn import compute_dtype
from stretto.parallel.rows import Chunk
from stretto.parallel.stage import LayerDropout, run_layer, state_widths
from stretto.parallel.wavefront import run_chunk

Place = tuple[nn.Module, str]
"""A parameter's owner, and its name there."""


def leaves_of(blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Return what computes in these blocks, in order; a Residual comes before and after what it adds its input to."""
    for block in blocks:
        if type(block) is Residual:
            yield from (block, *leaves_of([block.block]), block)
        elif type(block) is nn.Sequential or isinstance(block, nn.ModuleList):  # a Stack is one
            yield from leaves_of(block.children())
        else:
            yield block


def begin(leaf: nn.Module, rows: Rows, carried: State | None = None) -> State:
    """Return the state of a leaf at the start of a window."""
    if isinstance(leaf, Block):
        return () if type(leaf) is Residual else leaf.begin(rows, carried)
    if not isinstance(leaf, nn.RNNBase):
        return ()
    initial = tuple(rows.zeros(width) for width in state_widths(leaf) * leaf.num_layers)
    return initial if carried is None else where_rows(rows.fresh, initial, carried)


class StackStage(LayerStage):
    """Some blocks of a Stack."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        first: int,  # the number of its first leaf in the whole Stack
        places: Sequence[Place],  # of the weights
        weights: Sequence[Tensor],
        rows: CallRows,
        like: Tensor,  # has the device and the dtype of its state
    ) -> None:
        self._leaves, self._places, self._weights, self.rows = [*leaves_of(blocks)], places, weights, rows
        self._first, self._initial = first, list[State]()
        self._dropout = LayerDropout.of_rows(rows.seeds, rows.packing) if rows.seeds else None
        seeds = rows.seeds or [0] * len(rows.packing.num_rows)
        self._of_ranks = [
            Rows.of(count, key=seed, device=like.device, dtype=like.dtype)
            for count, seed in zip(rows.packing.num_rows, seeds, strict=True)
        ]
        self._resets: dict[int, list[int]] = {}  # by time: the rows that begin anew, as places in packed order
        places_of_rows = torch.split(torch.argsort(rows.packing.order), rows.packing.num_rows)
        for resets, place_of in zip(rows.resets, places_of_rows, strict=False):
            for time, row in resets.tolist():
                self._resets.setdefault(time, []).append(int(place_of[row]))

    def make_state(self) -> State:
        sort = self.rows.packing.sort_rows
        with _using(self._places, self._weights):
            for number, leaf in enumerate(self._leaves, self._first):
                states = [begin(leaf, rows.for_block(number)) for rows in self._of_ranks]
                self._initial.append(tuple(sort(parts) for parts in zip(*states, strict=True)))
        return tuple(tensor for state in self._initial for tensor in state)

    def run(self, steps: Tensor, chunk: Chunk, state: State) -> tuple[Tensor, State]:
        left, after = iter(state), list[Tensor]()
        added: list[tuple[nn.Module, Tensor]] = []  # residual connections that are open
        with _using(self._places, self._weights):
            for index, leaf in enumerate(self._leaves):
                initial, site = self._initial[index], self._first + index << 16
                before = tuple(islice(left, len(initial)))
                if type(leaf) is Residual:
                    if added and added[-1][0] is leaf:
                        steps, _ = leaf._add(added.pop()[1], steps, ())
                    else:
                        added.append((leaf, steps))
                elif isinstance(leaf, nn.RNNBase):
                    steps, new = self._run_rnn(leaf, steps, chunk, before, initial, site)
                    after += new
                elif isinstance(leaf, nn.Dropout):
                    steps = self._drop(leaf, leaf.p, site, steps, chunk)
                elif not isinstance(leaf, Block):
                    steps = leaf(steps)
                elif initial:
                    pieces = self._cut(chunk, is_packed=False, remembers=leaf.remembers)
                    steps, new = _run_pieces(partial(_run_block, leaf), pieces, steps, before, initial)
                    after += new
                else:  # by the laws of chunks and rows, it treats each step alone: each may be a row
                    steps = leaf(steps.unsqueeze(0), ())[0].squeeze(0)
        return steps, tuple(after)

    def _run_rnn(
        self, rnn: nn.RNNBase, steps: Tensor, chunk: Chunk, state: State, initial: State, site: int
    ) -> tuple[Tensor, State]:
        after: list[Tensor] = []
        for layer in range(rnn.num_layers):
            own = slice(len(after), len(after) + len(state_widths(rnn)))
            pieces = self._cut(chunk, is_packed=True, remembers=True)
            steps, new = _run_pieces(partial(_run_rnn_layer, rnn, layer), pieces, steps, state[own], initial[own])
            after += new
            if layer < rnn.num_layers - 1:
                steps = self._drop(rnn, rnn.dropout, site + layer, steps, chunk)
        return steps, tuple(after)

    def _drop(self, leaf: nn.Module, p: float, site: int, steps: Tensor, chunk: Chunk) -> Tensor:
        return self._dropout(steps, p, site, chunk) if leaf.training and p and self._dropout is not None else steps

    def _cut(self, chunk: Chunk, *, is_packed: bool, remembers: bool) -> Iterator[tuple[Chunk, Tensor | None]]:
        """Cut a chunk where rows begin anew, and unless packed where rows end: then all pieces are rectangles.

        a a a a|a a|a            row b begins anew at time 4, where row c ends; row d ends with time 2
        b b b b|b b|b            (packed: cut at time 4 only)
        c c c c
        d d d
        """
        sizes = chunk.sizes.tolist()
        resets = {
            time: places
            for time, size in enumerate(sizes if remembers and self._resets else ())
            if (places := [place for place in self._resets.get(chunk.start + time, ()) if place < size])
        }
        ends = {time for time in range(1, len(sizes)) if not is_packed and sizes[time] != sizes[time - 1]}
        cuts = sorted({0, *resets, *ends})
        stop = 0
        for time, end in zip(cuts, [*cuts[1:], len(sizes)], strict=True):
            start, stop = stop, stop + sum(sizes[time:end])
            is_new = torch.zeros(chunk.num_rows, dtype=torch.bool) if time in resets else None
            if is_new is not None:
                is_new[resets[time]] = True
            yield Chunk(slice(start, stop), chunk.sizes[time:end], chunk.start + time), is_new


@contextmanager
def _using(places: Sequence[Place], weights: Sequence[Tensor]) -> Iterator[None]:
    """Let modules compute with other weights than their own, at once: `torch.func.functional_call` takes long."""
    own = [owner._parameters[name] for owner, name in places]
    try:
        for (owner, name), weight in zip(places, weights, strict=True):
            owner._parameters[name] = weight  # type: ignore[assignment]
        yield
    finally:
        for (owner, name), parameter in zip(places, own, strict=True):
            owner._parameters[name] = parameter


def _run_pieces(
    call: Callable[[Tensor, Chunk, State], tuple[Tensor, State]],
    pieces: Iterator[tuple[Chunk, Tensor | None]],
    steps: Tensor,
    state: State,
    initial: State,
) -> tuple[Tensor, State]:
    outputs = []
    for piece, is_new in pieces:
        if is_new is not None:
            state = where_rows(is_new, tuple(tensor[: len(is_new)] for tensor in initial), state)
        y, state = run_chunk(call, steps[piece.steps], piece, state)
        outputs.append(y)
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0], state


def _run_rnn_layer(rnn: nn.RNNBase, layer: int, steps: Tensor, chunk: Chunk, state: State) -> tuple[Tensor, State]:
    weights = [getattr(rnn, name) for name in rnn._all_weights[layer]]
    dtype = compute_dtype(rnn, weights[0])
    before = tuple(tensor.to(dtype) for tensor in state)
    y, after = run_layer(rnn, [weight.to(dtype) for weight in weights], steps.to(dtype), chunk, before)
    return y, tuple(new.to(old.dtype) for new, old in zip(after, state, strict=True))


def _run_block(block: Block, steps: Tensor, chunk: Chunk, state: State) -> tuple[Tensor, State]:
    y, after = block(torch.unflatten(steps, 0, (len(chunk.sizes), chunk.num_rows)), state)
    return y.flatten(0, 1), after
