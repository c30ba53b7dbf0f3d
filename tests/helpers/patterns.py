"""Modules with recurrent layers as people write them, each with its inputs; regions must not change what they compute.

Each has `inputs(rows)`, the module's arguments for some rows, and returns tensors whose first dimension is rows, or a
dict or tuple of them. Rows are numbered alike everywhere.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from stretto.nn import SLSTM, MinLSTM, Residual
from stretto.parallel import Stack

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


class FrozenBatchNorm(Pattern):
    """A batch norm with the statistics of its pretraining; nn.SyncBatchNorm refuses to run on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(WIDTH, HIDDEN, 3, stride=2, padding=1), nn.BatchNorm1d(HIDDEN).eval()
        nn.init.normal_(self.norm.get_buffer("running_mean"))
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, 4, batch_first=True)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        features = torch.relu(self.norm(self.convolution(x.permute(0, 2, 1)))).permute(0, 2, 1)
        return torch.log_softmax(self.lstm(features)[0], -1)


class TakeOutput(nn.Module):
    def forward(self, result: Any) -> Any:  # noqa: ANN401
        return result[0]


class Sequential(Pattern):
    """Several LSTMs in sequence, each behind a wrapper that takes its output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN),
            nn.LSTM(HIDDEN, 5, 4, batch_first=True), TakeOutput(), nn.ReLU(),
            nn.LSTM(5, HIDDEN, 5, batch_first=True), TakeOutput(), nn.LayerNorm(HIDDEN),
            nn.LSTM(HIDDEN, 4, 4, batch_first=True), TakeOutput(), nn.Linear(4, 2),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        return self.net(x)[:, -3:]


class AttentionLoop(Pattern):
    """Teacher forcing, one step at a time: each step looks at the encoder's output with the decoder's state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.GRU(WIDTH, HIDDEN, 4, batch_first=True)
        self.decoder = nn.GRU(WIDTH + HIDDEN, HIDDEN, 4, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def inputs(self, rows: slice) -> tuple[Any, ...]:
        return symbols(rows), symbols(rows, 3, seed=1)

    def forward(self, source: Tensor, target: Tensor) -> Any:  # noqa: ANN401
        memory, hidden = self.encoder(self.embedding(source))
        logits = []
        for step in range(target.size(1)):
            weights = torch.softmax(torch.bmm(memory, hidden[-1].unsqueeze(2)), 1)
            context = (weights * memory).sum(1, keepdim=True)
            decoded, hidden = self.decoder(torch.cat([self.embedding(target[:, step : step + 1]), context], 2), hidden)
            logits.append(self.head(decoded))
        return torch.cat(logits, 1)


class BidirectionalEncoder(Pattern):
    """A bidirectional encoder, whose two final states begin the causal decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(WIDTH, HIDDEN // 2, 4, batch_first=True, bidirectional=True)
        self.decoder = nn.LSTM(WIDTH, HIDDEN, 4, batch_first=True)

    def inputs(self, rows: slice) -> tuple[Any, ...]:
        return values(rows, 7, WIDTH), values(rows, STEPS, WIDTH, seed=1)

    def forward(self, source: Tensor, target: Tensor) -> Any:  # noqa: ANN401
        _, (h, c) = self.encoder(source)
        h, c = (torch.cat([part[0::2], part[1::2]], dim=2) for part in (h, c))
        return self.decoder(target, (h, c))[0]


class WeightNorm(Pattern):
    """Recurrent weights that are computed from others, with torch's parametrization and with its older hook."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(WIDTH, HIDDEN, 4, batch_first=True), nn.GRU(HIDDEN, HIDDEN, 4, batch_first=True)
        for layer in range(4):
            parametrizations.weight_norm(self.lstm, f"weight_hh_l{layer}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # deprecated, and in many models
                nn.utils.weight_norm(self.gru, f"weight_hh_l{layer}")

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        return self.gru(self.lstm(x)[0])[0]


class WeightDrop(LastStep):
    """As in AWD-LSTM: a copy of the weights is set before each call (here, without dropping any)."""

    def __init__(self) -> None:
        super().__init__()
        for layer in range(4):
            name = f"weight_hh_l{layer}"
            self.register_parameter(f"{name}_raw", nn.Parameter(self.lstm.get_parameter(name).detach()))
            del self.lstm._parameters[name]

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        for layer in range(4):
            name = f"weight_hh_l{layer}"
            setattr(self.lstm, name, nn.functional.dropout(self.get_parameter(f"{name}_raw"), p=0.0))
        return super().forward(x)


class LastOutputLSTM(nn.LSTM):
    """A user's own class: other arguments, other weights at the start, and another forward."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden, num_layers=4, batch_first=True)
        for layer in range(4):
            self.get_parameter(f"bias_hh_l{layer}").data[hidden : 2 * hidden].fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        output: Tensor = super().forward(x * 0.5)[0]
        return output[:, -1]


class OwnClass(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = LastOutputLSTM(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        return self.lstm(x)


class Tutorial(LastStep):
    """`flatten_parameters` before each call, arguments by name, the state as an attribute."""

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        self.lstm.flatten_parameters()
        weight = next(self.parameters())
        self.hidden = tuple(weight.new_zeros(4, x.size(0), HIDDEN) for _ in range(2))
        output, self.hidden = self.lstm(input=x, hx=self.hidden)
        return self.head(output.contiguous().view(-1, HIDDEN)).view(x.size(0), x.size(1), 5)


class LanguageModel(Pattern):
    """Time first; outputs and states are changed in place, and viewed as one row after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.gru, self.rnn = nn.GRU(HIDDEN, HIDDEN, 4), nn.RNN(HIDDEN, HIDDEN, 4, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def inputs(self, rows: slice) -> tuple[Any, ...]:
        return (symbols(rows),)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        embedded = self.embedding(x).transpose(0, 1).contiguous()
        output, hidden = self.gru(embedded)
        output += embedded
        hidden *= 0.5
        logits = self.head(output.view(-1, HIDDEN)).view(STEPS, -1 if len(x) else 0, VOCABULARY)
        hidden[2:] = 0.0
        upper, _ = self.rnn(output.transpose(0, 1), hidden)
        return logits.transpose(0, 1), nn.functional.elu(upper, inplace=True)


class LearnedState(LastStep):
    """The initial state is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.c = nn.Parameter(torch.randn(4, 1, HIDDEN)), nn.Parameter(torch.randn(4, 1, HIDDEN))

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        state = [part.expand(-1, x.size(0), -1).contiguous() for part in (self.h, self.c)]
        return self.head(self.lstm(x, state)[0])


class AnyOrder(Pattern):
    """Layers called in another order than they were made, some twice, some side by side; mixed batch_first."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict(
            {"late": nn.LSTM(HIDDEN, HIDDEN, 4), "early": nn.GRU(WIDTH, HIDDEN, 4, batch_first=True)}
        )
        self.backwards = nn.RNN(WIDTH, HIDDEN, 4)
        self.top = nn.GRU(HIDDEN, HIDDEN, 5, batch_first=True)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        early = self.branches["early"](x)[0]
        reverse = self.backwards(x.flip(1).transpose(0, 1))[0].flip(0)
        once = self.top(early)[0] + reverse.transpose(0, 1)
        late = self.branches["late"](once.transpose(0, 1))[0] * reverse
        return self.top(late.transpose(0, 1))[0], self.branches["early"](x[:, 3:])[1].transpose(0, 1)


class Teacher(LastStep):
    """A target from the same layer, without gradients."""

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        with torch.no_grad():
            target = self.lstm(x + 0.1)[0].mean(1)
        return self.head(self.lstm(x)[0].mean(1)) - self.head(target)


class Resets(Pattern):
    """Recurrent reinforcement learning: states are zeroed where an episode has ended; policy and value."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, HIDDEN, 4)
        self.policy, self.value = nn.Linear(HIDDEN, 3), nn.Linear(HIDDEN, 1)

    def inputs(self, rows: slice) -> tuple[Any, ...]:
        return values(rows, STEPS, WIDTH), values(rows, 2, seed=4) > 0

    def forward(self, x: Tensor, is_done: Tensor) -> Any:  # noqa: ANN401
        hidden, outputs = x.new_zeros(4, len(x), HIDDEN), []
        for index in range(2):
            hidden = hidden * ~is_done[:, index].view(1, -1, 1)
            output, hidden = self.gru(x[:, 6 * index : 6 * index + 6].transpose(0, 1), hidden)
            outputs.append(output)
        features = torch.cat(outputs).transpose(0, 1)
        return self.policy(features), self.value(features).squeeze(-1)


class Stacked(Pattern):
    """Embedding, layers of any kind and a head in one Stack, with rows of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.GRU(WIDTH, HIDDEN, 2, batch_first=True), nn.LayerNorm(HIDDEN), nn.Tanh()]
        self.layers = Stack(
            [
                nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)),
                nn.LSTM(WIDTH, WIDTH, batch_first=True),
                MinLSTM(WIDTH, WIDTH),
                Stack(layers, batch_first=True),
                Residual(SLSTM(HIDDEN, HIDDEN, 2)),
                nn.Linear(HIDDEN, VOCABULARY),
            ],
            batch_first=True,
        )

    def inputs(self, rows: slice) -> tuple[Any, ...]:
        return symbols(rows), torch.tensor(LENGTHS)[rows]

    def forward(self, x: Tensor, lengths: Tensor) -> Any:  # noqa: ANN401
        return self.layers(x, lengths=lengths)


class ThreeWays(Pattern):
    """A Stack with resets, a bidirectional layer and a causal one in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Stack([nn.LSTM(width, HIDDEN) for width in (WIDTH, HIDDEN, HIDDEN, HIDDEN)])
        self.both = nn.LSTM(HIDDEN, HIDDEN // 2, 2, bidirectional=True)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, 4)

    def inputs(self, rows: slice) -> tuple[Any, ...]:
        return values(rows, STEPS, WIDTH), values(rows, STEPS, seed=7) > 1

    def forward(self, x: Tensor, is_start: Tensor) -> Any:  # noqa: ANN401
        y, state = self.layers(x.transpose(0, 1), resets=is_start.t())
        y, _ = self.lstm(self.both(y)[0])
        return y.transpose(0, 1), state


class PackedSorted(Packed):
    """As before `enforce_sorted`: rows are sorted by hand, and put back."""

    def forward(self, x: Tensor, lengths: Tensor) -> Any:  # noqa: ANN401
        order = torch.argsort(lengths, descending=True)
        packed = (
            pack_padded_sequence(x[order], lengths[order].tolist(), batch_first=True) if len(x) else pack(x, lengths)
        )
        _, (h, _) = self.lstm(packed)
        return self.head(h[-1][torch.argsort(order)])


class Unbatched(Pattern):
    """Row by row, without a dimension of rows; only where all ranks have equally many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, HIDDEN, 4)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        outputs = []
        for row in x:
            _, state = self.lstm(row[:1])
            output, (h, _) = self.lstm(row, state)
            outputs.append(output.sum(0) + h[-1])
        return torch.stack(outputs)


def pack(x: Tensor, lengths: Tensor) -> PackedSequence:
    if len(lengths):
        return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    none = torch.zeros(0, dtype=torch.int64)  # torch refuses to pack no rows
    return PackedSequence(x.flatten(0, 1), none, none, none)


PATTERNS: list[Callable[[], Pattern]] = [
    LastStep, OwnZeros, Stacked, FinalState, EveryStep, ThreeWays, ResidualStack, TwoHeads, Attention, Tagger,
    TiedWeights, SideInput, DictInput, Convolution, Autoencoder, Translation, DecodeLoop, Siamese, KeptState,
    Windows, Packed, PackedWithState, PackedGru, Projection, NoBias, Relu, Frozen, Mixed, InputGradient,
    FrozenBatchNorm, Sequential, AttentionLoop, BidirectionalEncoder, WeightNorm, WeightDrop, OwnClass, Tutorial,
    LanguageModel, LearnedState, AnyOrder, Teacher, Resets, PackedSorted,
]  # fmt: skip

ROWS = {2: (5, 4), 3: (3, 0, 6), 4: (2, 0, 3, 4)}  # of each rank


def tensors(tree: Any) -> list[Tensor]:  # noqa: ANN401
    """Return all tensors of a module's output, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for part in (tree.values() if isinstance(tree, dict) else tree) for tensor in tensors(part)]


def loss_of(outputs: list[Tensor]) -> Tensor:
    """Return a sum over rows, so that the losses of ranks add up to that of one device."""
    return torch.stack([(output * output.cos()).sum() for output in outputs]).sum()


def make(pattern: Any) -> Pattern:  # noqa: ANN401
    torch.manual_seed(0)
    module: Pattern = pattern().double()
    return module


def own_rows(rank: int, rows: tuple[int, ...]) -> slice:
    return slice(sum(rows[:rank]), sum(rows[: rank + 1]))
