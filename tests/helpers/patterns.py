"""Modules with recurrent layers as people write them, each with its inputs; regions must not change what they compute.

Each has `inputs(rows)`, the module's arguments for some rows, and returns tensors whose first dimension is rows, or a
dict or tuple of them. Rows are numbered alike everywhere.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

WIDTH, HIDDEN, STEPS, VOCABULARY = 6, 8, 12, 20
LENGTHS = (7, 12, 3, 9, 12, 5, 10, 1, 8)


def values(rows: slice, *shape: int, seed: int = 0) -> Tensor:
    """Return random values of some of nine rows."""
    return torch.randn(9, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)[rows]


def symbols(rows: slice, steps: int = STEPS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (9, steps), generator=generator)[rows]


class Pattern(nn.Module):
    """One way to use a recurrent layer."""

    def inputs(self, rows: slice) -> tuple[Any, ...]:
        return (values(rows, STEPS, WIDTH),)


class LastStep(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, HIDDEN, 4, batch_first=True)
        self.head = nn.Linear(HIDDEN, 5)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        output, _ = self.lstm(x)
        return self.head(output[:, -1, :])


class OwnZeros(LastStep):
    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        zeros = torch.zeros(4, x.size(0), HIDDEN, dtype=x.dtype)
        output, _ = self.lstm(x, (zeros, zeros.clone()))
        return self.head(output[:, -1])


class FinalState(LastStep):
    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        _, (h, c) = self.lstm(x)
        return self.head(h[-1]) + self.head(c[0])


class EveryStep(LastStep):
    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        return torch.relu(self.head(self.lstm(x)[0]))


class ResidualStack(Pattern):
    """Several recurrent layers in sequence, with a skip connection and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, HIDDEN)
        self.layers = nn.ModuleList(
            [nn.LSTM(HIDDEN, HIDDEN, 4, batch_first=True), nn.GRU(HIDDEN, HIDDEN, 4, batch_first=True)]
        )
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        x = self.inp(x)
        for layer in self.layers:
            x = self.norm(x + layer(x)[0])
        return x


class TwoHeads(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, HIDDEN, 4)
        self.mean, self.scale = nn.Linear(HIDDEN, 1), nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        output = self.rnn(x.transpose(0, 1))[0].transpose(0, 1)
        return {"mean": self.mean(output), "scale": torch.exp(self.scale(output))}


class Attention(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, HIDDEN, 4, batch_first=True)
        self.score, self.head = nn.Linear(HIDDEN, 1), nn.Linear(HIDDEN, 5)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        output, _ = self.lstm(x)
        return self.head((torch.softmax(self.score(output), 1) * output).sum(1))


class Tagger(Pattern):
    """`len(x)`, one sentence at a time, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, HIDDEN, 4)
        self.head = nn.Linear(HIDDEN, 5)

    def inputs(self, rows: slice) -> tuple[Any, ...]:
        return (symbols(rows),)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        embedded = self.embedding(x).transpose(0, 1)
        output, _ = self.lstm(embedded)
        return torch.log_softmax(self.head(output.reshape(STEPS, len(x), HIDDEN)), 2).transpose(0, 1)


class TiedWeights(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, 4, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def inputs(self, rows: slice) -> tuple[Any, ...]:
        return (symbols(rows),)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        return self.head(self.lstm(self.embedding(x))[0])


class SideInput(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, HIDDEN, 4, batch_first=True)
        self.head = nn.Linear(HIDDEN + 3, 1)

    def inputs(self, rows: slice) -> tuple[Any, ...]:
        return values(rows, STEPS, WIDTH), values(rows, 3, seed=1)

    def forward(self, x: Tensor, side: Tensor) -> Any:  # noqa: ANN401
        _, h = self.gru(x)
        return self.head(torch.cat([h[-1], side], 1))


class DictInput(LastStep):
    def inputs(self, rows: slice) -> tuple[Any, ...]:
        return ({"x": values(rows, STEPS, WIDTH), "gain": values(rows, 1, seed=2)},)

    def forward(self, batch: dict[str, Tensor]) -> Any:  # type: ignore[override]  # noqa: ANN401
        return super().forward(batch["x"]) * batch["gain"]


class Convolution(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, HIDDEN, 3, padding=1)
        self.rnn = nn.RNN(HIDDEN, HIDDEN, 4, batch_first=True)
        self.head = nn.Linear(HIDDEN, 5)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        features = torch.relu(self.convolution(x.transpose(1, 2))).transpose(1, 2)
        return self.head(self.rnn(features)[0][:, -1])


class Autoencoder(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(WIDTH, HIDDEN, 4, batch_first=True)
        self.decoder = nn.LSTM(HIDDEN, HIDDEN, 4, batch_first=True)
        self.head = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        _, (h, _) = self.encoder(x)
        return self.head(self.decoder(h[-1].unsqueeze(1).repeat(1, x.size(1), 1))[0])


class Translation(Pattern):
    """Encoder and decoder with attention; their lengths differ."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.LSTM(WIDTH, HIDDEN, 4, batch_first=True)
        self.decoder = nn.LSTM(WIDTH, HIDDEN, 4, batch_first=True)
        self.head = nn.Linear(2 * HIDDEN, VOCABULARY)

    def inputs(self, rows: slice) -> tuple[Any, ...]:
        return symbols(rows), symbols(rows, 9, seed=1)

    def forward(self, source: Tensor, target: Tensor) -> Any:  # noqa: ANN401
        memory, state = self.encoder(self.source(source))
        output, _ = self.decoder(self.target(target), state)
        weights = torch.softmax(output @ memory.transpose(1, 2), -1)
        return self.head(torch.cat([output, weights @ memory], -1))


class DecodeLoop(Pattern):
    """A loop of single steps: such calls are not shared."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(WIDTH, HIDDEN, 4, batch_first=True)
        self.decoder = nn.LSTM(3, HIDDEN, 4, batch_first=True)
        self.head = nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        _, state = self.encoder(x)
        step, outputs = torch.zeros(x.size(0), 1, 3, dtype=x.dtype), []
        for _ in range(3):
            output, state = self.decoder(step, state)
            step = self.head(output)
            outputs.append(step)
        return torch.cat(outputs, 1)


class Siamese(LastStep):
    """The same layer twice in a forward."""

    def inputs(self, rows: slice) -> tuple[Any, ...]:
        return values(rows, STEPS, WIDTH), values(rows, STEPS, WIDTH, seed=3)

    def forward(self, one: Tensor, other: Tensor) -> Any:  # type: ignore[override]  # noqa: ANN401
        return super().forward(one) - super().forward(other)


class KeptState(LastStep):
    """The module keeps its state from call to call, cut off from the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        first, state = self.lstm(x[:, :6], self.kept)
        second, state = self.lstm(x[:, 6:], tuple(part.detach() for part in state))
        self.kept = None
        return self.head(first + second)


class Windows(LastStep):
    """Truncated BPTT within one forward, with the state attached."""

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        first, state = self.lstm(x[:, :6])
        second, _ = self.lstm(x[:, 6:], state)
        return self.head(torch.cat([first, second], 1))


class Packed(Pattern):
    """Rows of different lengths, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, HIDDEN, 4, batch_first=True)
        self.head = nn.Linear(HIDDEN, 5)

    def inputs(self, rows: slice) -> tuple[Any, ...]:
        return values(rows, STEPS, WIDTH), torch.tensor(LENGTHS)[rows]

    def forward(self, x: Tensor, lengths: Tensor) -> Any:  # noqa: ANN401
        packed, (h, _) = self.lstm(pack(x, lengths))
        output = (
            pad_packed_sequence(packed, batch_first=True, total_length=STEPS)[0]
            if len(x)
            else x.new_zeros(0, STEPS, HIDDEN) + packed.data.sum()
        )
        return self.head(output), self.head(h[-1])


class PackedWithState(Packed):
    def forward(self, x: Tensor, lengths: Tensor) -> Any:  # noqa: ANN401
        state = x[:, 0, :1].expand(-1, HIDDEN).repeat(4, 1, 1)
        _, (h, c) = self.lstm(pack(x, lengths), (state, state * 0.5))
        return self.head(h[-1] + c[1])


class PackedGru(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, HIDDEN, 4, batch_first=True)

    def inputs(self, rows: slice) -> tuple[Any, ...]:
        return values(rows, STEPS, WIDTH), torch.tensor(LENGTHS)[rows]

    def forward(self, x: Tensor, lengths: Tensor) -> Any:  # noqa: ANN401
        return self.gru(pack(x, lengths))[1].transpose(0, 1)


class Projection(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, HIDDEN, 4, batch_first=True, proj_size=3)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        output, (h, c) = self.lstm(x)
        return output, h.transpose(0, 1), c.transpose(0, 1)


class NoBias(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, HIDDEN, 5, bias=False)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        return self.gru(x.transpose(0, 1))[0].transpose(0, 1)


class Relu(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(WIDTH, HIDDEN, 4, nonlinearity="relu", batch_first=True)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        return self.rnn(x)[0]


class Frozen(LastStep):
    """Some weights are not trained."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.lstm.named_parameters():
            parameter.requires_grad = not name.endswith(("l0", "l3"))


class Mixed(Pattern):
    """A region beside layers that stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(WIDTH, HIDDEN, batch_first=True)
        self.both = nn.GRU(HIDDEN, HIDDEN, 2, batch_first=True, bidirectional=True)
        self.shared = nn.LSTM(2 * HIDDEN, HIDDEN, 4, batch_first=True)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        return self.shared(self.both(self.first(x)[0])[0])[0]


class InputGradient(Pattern):
    """A loss through the gradient-carrying input of another layer, and an output that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.lstm = nn.LSTM(WIDTH, HIDDEN, 4, batch_first=True)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        _, (h, _) = self.lstm(self.before(x))
        return h[1]


class Unbatched(Pattern):
    """One row without a dimension of rows; only where each rank has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, HIDDEN, 4)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        output, (h, _) = self.lstm(x[0])
        return (output.sum(0) + h[-1]).unsqueeze(0)


def pack(x: Tensor, lengths: Tensor) -> PackedSequence:
    if len(lengths):
        return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    none = torch.zeros(0, dtype=torch.int64)  # torch refuses to pack no rows
    return PackedSequence(x.flatten(0, 1), none, none, none)


PATTERNS: list[Callable[[], Pattern]] = [
    LastStep, OwnZeros, FinalState, EveryStep, ResidualStack, TwoHeads, Attention, Tagger, TiedWeights, SideInput,
    DictInput, Convolution, Autoencoder, Translation, DecodeLoop, Siamese, KeptState, Windows, Packed, PackedWithState,
    PackedGru, Projection, NoBias, Relu, Frozen, Mixed, InputGradient,
]  # fmt: skip
