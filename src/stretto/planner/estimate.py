"""The time of a training step of a recurrent layer in a layout, under one assumption about the GPU.

A time step of a cell takes the longest of a launch, its arithmetic, and reading its recurrent weights, which happens
at every time step. Matrix products with all inputs of a chunk, and for the gradients of the weights, come on top. cuDNN
can run the layers of one call side by side (layer 1 a time step behind layer 0), and both ways of a bidirectional one;
it is taken to do so where that is faster. A stage calls its layers one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from stretto.parallel.layout import Layout
from stretto.parallel.rnn import RnnLayers
from stretto.planner.gpus import PRECISIONS, Assumption, Gpu

_GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
_Seconds = tuple[float, float]  # of a forward and its backward


@dataclass(frozen=True)
class Work:
    """A recurrent layer and its batch: the rows of all ranks together, all of the same length."""

    rnn: nn.RNNBase
    rows: int
    steps: int
    ranks: int
    precision: str

    @cached_property
    def size(self) -> int:
        """The bytes of a number."""
        return PRECISIONS[self.precision]

    @cached_property
    def ways(self) -> int:
        return 2 if self.rnn.bidirectional else 1

    @cached_property
    def gates(self) -> int:
        return _GATES[self.rnn.mode] * self.rnn.hidden_size

    @cached_property
    def output_width(self) -> int:
        """The width of what a layer returns, one way."""
        return self.rnn.proj_size or self.rnn.hidden_size

    def input_width(self, layer: int) -> int:
        return self.output_width * self.ways if layer else self.rnn.input_size

    @cached_property
    def recurrent_weights(self) -> int:
        """How many weights a cell of one layer and way reads at every time step."""
        return self.gates * self.output_width + self.rnn.hidden_size * self.rnn.proj_size

    def weights(self, layers: Sequence[int]) -> int:
        """Return the number of weights of some layers, both ways."""
        return sum(self.ways * (self.gates * self.input_width(each) + self.recurrent_weights) for each in layers)

    def layers(self, layout: Layout) -> list[range]:
        """Return the layers of each rank that shares the region in a layout."""
        if self.rnn.bidirectional or layout.num_stages == 1:
            return [range(self.rnn.num_layers)] * layout.num_ranks(is_bidirectional=self.rnn.bidirectional)
        return layout.split(RnnLayers(self.rnn).costs)


class Estimator:
    """The times of one layer under one assumption."""

    def __init__(self, work: Work, gpu: Gpu, guess: Assumption) -> None:
        self._work, self._gpu, self._guess = work, gpu, guess
        self._flops = gpu.flops[work.precision] * guess.reached

    def seconds(self, layout: Layout, layers: Sequence[range], *, split_weights: bool = False) -> float:
        """Return the seconds of forward, backward, messages, and the all-reduce of this layer's gradients.

        The all-reduce is never hidden, in DDP and in regions alike: the gradients come when the backward ends.
        """
        work, guess = self._work, self._guess
        count, everything = len(layers), range(work.rnn.num_layers)
        if count == 1:
            alone = self._call(everything, -(-work.rows // work.ranks), work.steps, work.ways)
            return sum(max(each, guess.host) for each in alone) + self._all_reduce(everything, work.ranks)
        rows = -(-work.rows * count // work.ranks)  # of a group
        slots = self._spans(rows, count) if work.rnn.bidirectional else self._stages(layout, layers, rows)
        # Before and after, and in the backward again, one rank exchanges values with all others.
        values = rows * work.steps * (work.input_width(0) + work.output_width * work.ways) * work.size
        swaps = 4 * guess.latency + 2 * values * (count - 1) / count / guess.bandwidth
        if split_weights:
            reduce = max(self._all_reduce(own, work.ranks // count) for own in layers)
        else:
            reduce = self._all_reduce(everything, work.ranks)
        return slots + swaps + 2 * guess.guard + reduce

    def _stages(self, layout: Layout, layers: Sequence[range], rows: int) -> float:
        work, steps = self._work, -(-self._work.steps // layout.chunks)
        message = self._message(rows * steps * work.output_width)
        calls_of = self._calls(rows, steps)
        by_stage = []
        for own in layers:
            calls = [calls_of[layer] for layer in own]
            forward, backward = (sum(each) for each in zip(*calls, strict=True))
            # Each chunk adds its gradients to those of the chunks before: two reads and a write.
            backward += 3 * work.weights(own) * work.size / self._gpu.bandwidth + forward * layout.recompute
            by_stage.append((forward, backward))
        slot = sum(max(self._guess.host, *each) + message for each in zip(*by_stage, strict=True))
        return float((layout.chunks + len(layers) - 1) * slot)

    def _spans(self, rows: int, count: int) -> float:
        """Return the seconds of all slots: in each, a rank runs at most one piece of each way."""
        work, layers = self._work, self._work.rnn.num_layers
        groups = min(count, rows) if count > 2 else 1
        calls = self._calls(-(-rows // groups), -(-work.steps // count))
        message = self._message(-(-rows // groups) * (work.output_width + work.rnn.hidden_size))
        total = 0.0
        for slot in range(layers * count + count - 1):
            by_rank = []
            for rank in range(count):
                pieces = [divmod(slot - rank, count), divmod(slot - (count - 1 - rank), count)]
                own = [calls[layer] for layer, group in pieces if 0 <= layer < layers and group < groups]
                by_rank.append([sum(each[index] for each in own) for index in (0, 1)])
            total += sum(max(self._guess.host, *each) + message for each in zip(*by_rank, strict=True) if any(each))
        return total

    def _calls(self, rows: int, steps: int) -> list[_Seconds]:
        """Return the seconds of each layer alone, one way."""
        inner = [self._call([1], rows, steps, 1)] * (self._work.rnn.num_layers - 1)  # they are all alike
        return [self._call([0], rows, steps, 1), *inner]

    def _call(self, layers: Sequence[int], rows: int, steps: int, ways: int) -> _Seconds:
        """Return the seconds of one call of torch: these layers side by side, one way or two."""
        work, guess, gpu = self._work, self._guess, self._gpu
        cells = len(layers) * ways

        def busy(num_matrices: int) -> float:  # of one cell, a time step, while so many recurrent matrices are in use
            num_bytes = work.recurrent_weights * work.size
            faster = guess.cached if num_matrices * num_bytes <= gpu.cache else 1.0
            return max(2 * work.recurrent_weights * rows / self._flops, num_bytes / gpu.bandwidth / faster)

        one_by_one = cells * steps * max(guess.launch, busy(1))
        waits = (steps + len(layers) - 1) if ways == 1 else len(layers) * steps
        side_by_side = max(waits * max(guess.launch, busy(cells)), cells * steps * busy(cells))
        sequence = min(one_by_one, side_by_side)
        inputs = sum(self._product(work.input_width(layer), rows * steps) for layer in layers) * ways
        state = self._product(work.output_width, rows * steps) * ways * len(layers)
        # The gradients of the inputs, of the input weights and of the recurrent weights.
        return sequence + inputs, sequence + 2 * inputs + state

    def _product(self, width: int, steps: int) -> float:
        """Return the seconds of a matrix product of all gates with `steps` vectors of a width."""
        work = self._work
        moved = (work.gates * width + steps * (width + work.gates)) * work.size
        return max(2 * work.gates * width * steps / self._flops, moved / self._gpu.bandwidth)

    def _message(self, numbers: int) -> float:
        return self._guess.latency + numbers * self._work.size / self._guess.bandwidth

    def _all_reduce(self, layers: Sequence[int], ranks: int) -> float:
        """Return the seconds of a ring all-reduce of fp32 gradients."""
        hops = 2 * (ranks - 1)
        return hops * (self._guess.latency + 4 * self._work.weights(layers) / max(ranks, 1) / self._guess.bandwidth)
