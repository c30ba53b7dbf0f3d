"""A bidirectional nn.LSTM, nn.GRU or nn.RNN over the ranks of a group, split over time: rank r has span r of all rows.

Rows are dealt into as many groups as there are ranks, but two ranks take turns with one group: each runs one direction,
then the other. The state of the forward direction flows to the right, that of the reverse direction to the left. A
layer begins as soon as both directions of the layer below have passed:

    3 ranks, groups a b c; capitals: the reverse direction; a layer every 3 slots
    slot       0   1   2   3   4   5   6   7
    rank 0     a   b   cA  aB  bC  cA  B   C       in the middle every rank computes two pieces in every slot
    rank 1         aA  bB  cC  aA  bB  cC
    rank 2     A   B   aC  bA  cB  aC  b   c
               `- layer 0 -'`- layer 1 ...

    forward piece (layer l, group g) on rank r: slot l * ranks + g + r
    reverse piece                             : slot l * ranks + g + ranks - 1 - r

Both need layer l - 1 of the same group on the same rank, which ended one slot earlier or more. What a piece returns as
state is sent and received in its own slot, to the neighbor on the right or on the left, as `messages` demands.

Rows of different lengths: a piece computes of each row the steps that it has in the span. A row without any passes its
state on unchanged, so the reverse direction of a row that ends early starts on the rank that has its last step.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from stretto.parallel.layers import Inputs, Layers, SharedCall, enter
from stretto.parallel.messages import Messages, Shape
from stretto.parallel.rows import Chunk, Packing, permute
from stretto.parallel.stage import LayerDropout, run_layer, state_widths
from stretto.parallel.wavefront import State, run_chunk

Piece = tuple[int, int, int]  # layer, way (0 forward, 1 reverse), group
_T = TypeVar("_T")


def run_spans(layers: Layers, inputs: Inputs, call: SharedCall) -> tuple[Tensor, list[Tensor]]:
    """Return the values of this rank's rows, and their state after all layers: layer by layer, way by way."""
    rnn = layers.module
    assert isinstance(rnn, nn.RNNBase)
    messages, packing, widths = call.messages, call.rows.packing, state_widths(rnn)
    rank, size, num_sets = messages.rank, messages.size, 2 * rnn.num_layers
    bounds = _bounds(packing, size)
    spans = [packing.slice(bounds[index], bounds[index + 1]) for index in range(size)]
    ways_in = [[way for way, begin in enumerate((0, size - 1)) if begin == each] for each in range(size)]
    ways_out = ways_in[::-1]  # a way ends where the other one begins

    # From rows to spans. The state of a way enters where the way begins.
    values = inputs.values(is_even=packing.is_even)  # before the weights enter, as in stages
    own_state = inputs.all_state() if call.has_state else []
    own_parts, order = _cut(values, packing, spans, bounds, rank)
    in_widths = _of_ways(ways_in[rank], widths * num_sets, len(widths))
    give = [[own_parts[to], *_of_ways(ways_in[to], own_state, len(widths))] for to in range(size)]
    take: list[list[Shape]] = [
        [spans[rank].values_shape(source, rnn.input_size)]
        + [packing.state_shape(source, width) for width in in_widths] * call.has_state
        for source in range(size)
    ]
    token = values.new_zeros((), requires_grad=call.needs_grad)
    token, weights = enter(layers, token, range(num_sets), inputs.dtype)
    token, received = messages.swap(token, give, take)
    steps = spans[rank].join([parts.pop(0) for parts in received])
    num_rows = len(packing.lengths)
    entering = [torch.cat(parts) for parts in zip(*received, strict=True)] or [
        values.new_zeros(num_rows, width) for width in in_widths
    ]

    groups = spans[rank].deal(size if size > 2 else 1)
    dropout = LayerDropout.of_rows(call.rows.seeds, packing) if rnn.dropout else None
    sweep = SpanSweep(rnn, weights, groups, dropout.deal(groups, bounds[rank]) if dropout else [], rank, messages)
    packed = [group.pack([part]) for group, part in zip(groups, spans[rank].split_rows(steps, groups), strict=True)]
    token, outputs, leaving = sweep.run(token, packed, entering, ways_in[rank], ways_out[rank])

    # From spans to rows.
    joined = spans[rank].join([group.unpack(y)[0] for group, y in zip(groups, outputs, strict=True)])
    out_parts, states = spans[rank].unjoin(joined), [torch.split(tensor, packing.num_rows) for tensor in leaving]
    give = [[out_parts[to], *(parts[to] for parts in states)] for to in range(size)]
    take = [
        [spans[source].values_shape(rank, joined.shape[-1])]
        + [packing.state_shape(rank, width) for width in _of_ways(ways_out[source], widths * num_sets, len(widths))]
        for source in range(size)
    ]
    _, received = messages.swap(token, give, take, call.before_backward)
    y = torch.cat([parts.pop(0) for parts in received])
    left = [iter(parts) for parts in received]
    state = [next(left[(size - 1, 0)[index % 2]]) for index in range(num_sets) for _ in widths]
    return y if order is None else permute(y, torch.argsort(order), order), state


def _bounds(packing: Packing, count: int) -> list[int]:
    """Return the bounds of spans of time with about the same number of steps of all rows."""
    if packing.is_even:
        return [packing.num_times * index // count for index in range(count + 1)]
    steps = packing.sizes.cumsum(0)
    targets = steps[-1] * torch.arange(1, count) // count
    return [0, *torch.searchsorted(steps, targets, right=True).tolist(), packing.num_times]


def _cut(
    values: Tensor, packing: Packing, spans: Sequence[Packing], bounds: Sequence[int], rank: int
) -> tuple[Sequence[Tensor], Tensor | None]:
    """Return the values of this rank's rows span by span, and their order in row-by-row values."""
    if packing.is_even:
        whole = values.reshape(packing.num_times, packing.num_rows[rank], values.shape[-1])
        return torch.split(whole, [span.num_times for span in spans]), None
    lengths = torch.split(packing.lengths, packing.num_rows)[rank]
    times = torch.cat([torch.arange(int(length)) for length in lengths] or [lengths])
    order = torch.argsort(torch.bucketize(times, torch.tensor(bounds[1:]), right=True), stable=True)
    return torch.split(permute(values, order, torch.argsort(order)), [span.num_steps[rank] for span in spans]), order


def _of_ways(ways: Sequence[int], per_set: Sequence[_T], count: int) -> list[_T]:
    """Return what belongs to some ways, of a list with `count` items for each layer and way."""
    return [item for index, item in enumerate(per_set) if index // count % 2 in ways]


class SpanSweep:
    """All layers, both ways, of the groups of rows in one span: one slot after another."""

    def __init__(
        self,
        rnn: nn.RNNBase,
        weights: Sequence[Sequence[Tensor]],  # of each layer and way
        groups: Sequence[Packing],
        dropouts: Sequence[LayerDropout],  # of each group, or none
        rank: int = 0,
        messages: Messages | None = None,  # without, one rank has the whole time
    ) -> None:
        self._rnn, self._groups, self._dropouts, self._rank, self._messages = rnn, groups, dropouts, rank, messages
        self._size = messages.size if messages is not None else 1
        self._widths, self._weights = state_widths(rnn), weights
        self._chunks = [group.chunks(1)[0] for group in groups]

    def run(
        self,
        token: Tensor,
        inputs: Sequence[Tensor],  # of each group, in packed order
        entering: Sequence[Tensor],  # for the ways that begin here, by layer and way
        ways_in: Sequence[int],
        ways_out: Sequence[int],
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the token, the output of each group, and the state of the ways that end here, by layer and way."""
        layers, sizes = range(self._rnn.num_layers), [len(group.lengths) for group in self._groups]
        states: dict[Piece, State] = {}
        by_group = iter([torch.split(tensor, sizes) for tensor in entering])
        for layer, way in ((layer, way) for layer in layers for way in ways_in):
            parts = [next(by_group) for _ in self._widths]
            states |= {(layer, way, group): tuple(each[group] for each in parts) for group in range(len(sizes))}
        outputs: dict[Piece, Tensor] = {}
        for slot in range(len(layers) * self._size + self._size - 1):
            sends, takes, coming = [], [], []
            for piece in self._pieces(slot, self._rank):
                outputs[piece], states[piece] = self._run_piece(piece, inputs, outputs, states[piece])
                to = self._rank + (1, -1)[piece[1]]
                if 0 <= to < self._size and sizes[piece[2]]:
                    sends.append((to, torch.cat(states[piece], 1)))
            for source in (self._rank - 1, self._rank + 1):
                for piece in self._pieces(slot, source):
                    if source + (1, -1)[piece[1]] == self._rank and sizes[piece[2]]:
                        takes.append((source, (sizes[piece[2]], sum(self._widths))))
                        coming.append(piece)
            token, received = self._messages.shift(token, sends, takes) if self._messages else (token, [])
            for piece, tensor in zip(coming, received, strict=True):
                states[piece] = tuple(part.contiguous() for part in torch.split(tensor, [*self._widths], 1))
        whole = [torch.cat([outputs[layers[-1], way, group] for way in (0, 1)], 1) for group in range(len(sizes))]
        leaving = [
            torch.cat([states[layer, way, group][index] for group in range(len(sizes))])
            for layer in layers
            for way in ways_out
            for index in range(len(self._widths))
        ]
        return token, whole, leaving

    def _pieces(self, slot: int, rank: int) -> list[Piece]:
        """Return what a rank computes in a slot."""
        if not 0 <= rank < self._size:
            return []
        pieces = [(divmod(slot - rank, self._size), 0), (divmod(slot - (self._size - 1 - rank), self._size), 1)]
        layers, groups = range(self._rnn.num_layers), range(len(self._groups))
        return [(layer, way, group) for (layer, group), way in pieces if layer in layers and group in groups]

    def _run_piece(
        self, piece: Piece, inputs: Sequence[Tensor], outputs: dict[Piece, Tensor], state: State
    ) -> tuple[Tensor, State]:
        layer, way, group = piece
        packing, chunk = self._groups[group], self._chunks[group]
        if layer == 0:
            x = inputs[group]
        else:
            x = torch.cat([outputs[layer - 1, each, group] for each in (0, 1)], 1)
            x = self._dropouts[group](x, self._rnn.dropout, layer - 1, chunk) if self._dropouts else x
        if not packing.num_times:
            return x.new_zeros(0, self._widths[0]), state

        def run(steps: Tensor, chunk: Chunk, state: State) -> tuple[Tensor, State]:
            return run_layer(self._rnn, self._weights[2 * layer + way], steps, chunk, state)

        y, state = run_chunk(run, packing.turn(x) if way else x, chunk, tuple(packing.sort_rows([s]) for s in state))
        return packing.turn(y) if way else y, tuple(packing.unsort_rows(tensor)[0] for tensor in state)
