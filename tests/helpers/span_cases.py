"""Random stacks that look ahead or have affine blocks, and training steps on them, in a layout and on one device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto import Engine, Layout, World, make_engine
from stretto.data import Window
from stretto.engine.precision import Precision
from stretto.nn import (
    GRU,
    LSTM,
    MLSTM,
    ActivationPenalty,
    AffineBlock,
    AffineRun,
    BidirectionalGRU,
    BidirectionalLSTM,
    Block,
    CausalConv,
    CrossEntropy,
    DecayMap,
    Dropout,
    Embedding,
    FinalStates,
    LayerNorm,
    Linear,
    LockedDropout,
    MaxPool,
    MeanPool,
    MinGRU,
    MinLSTM,
    PoolTime,
    Residual,
    Rows,
    Stack,
    StackFrames,
    State,
    WeightDropLSTM,
    WordDropEmbedding,
    initialize,
)
from stretto.testing import LocalEngine

NUM_TOKENS, WIDTH = 11, 6  # WIDTH is even: both directions together have as many features
HALF = WIDTH // 2


class EverySecond(Block):
    """Doubles every second time step: its state is an integer, and it does not say what it is later."""

    def initial_state(self, rows: Rows) -> State:
        return (torch.zeros(len(rows), dtype=torch.int64, device=rows.device),)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (time,) = state
        times = time + torch.arange(len(x)).unsqueeze(1)
        return x * (1 + times % 2).unsqueeze(2), (time + len(x),)


class CountedSteps(EverySecond):
    """Says what its state is later."""

    def advance(self, state: State, num_steps: int) -> State:
        return (state[0] + num_steps,)


class DecayedSum(AffineBlock):
    """A user's affine block, with an initial state that is trained: `h = decay * h + x`."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.initial = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.decay, 0.5, 1.0)
        nn.init.normal_(self.initial)

    def initial_state(self, rows: Rows) -> State:
        return (self.initial.expand(len(rows), -1),)

    def run_affine(self, x: Tensor) -> AffineRun:
        decays = self.decay.unsqueeze(0) ** torch.arange(1, len(x) + 1).unsqueeze(1)  # [time, features]
        local, h = [], torch.zeros_like(x[0])
        for step in x:
            h = self.decay * h + step
            local.append(h)
        local_outputs = torch.stack(local)

        def outputs(state: State) -> Tensor:
            return local_outputs + decays.unsqueeze(1) * state[0]

        return AffineRun(DecayMap(decays[-1].expand_as(h), h), outputs)


class NormedGRU(MinGRU):
    """Its `forward` does more than the `run_affine` that it inherits."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = super().forward(x, state)
        return self.norm(y), state


def hooked() -> Block:
    """Return an affine block with a hook that changes its outputs."""
    block = MinGRU(WIDTH, WIDTH)
    block.register_forward_hook(lambda block, inputs, result: (3 * result[0], result[1]))
    return block


BLOCKS: dict[str, Callable[[], Block]] = {
    "bilstm": lambda: BidirectionalLSTM(WIDTH, HALF),
    "bilstm2": lambda: BidirectionalLSTM(WIDTH, HALF, 2),
    "bigru": lambda: BidirectionalGRU(WIDTH, HALF, bias=False),
    "residual": lambda: Residual(Stack([BidirectionalGRU(WIDTH, HALF), Residual(BidirectionalLSTM(WIDTH, HALF))])),
    "nested": lambda: Stack([Dropout(0.3), BidirectionalLSTM(WIDTH, HALF), LSTM(WIDTH, WIDTH)]),
    "mingru": lambda: MinGRU(WIDTH, WIDTH),
    "minlstm": lambda: Residual(MinLSTM(WIDTH, WIDTH, bias=False)),
    "mlstm": lambda: MLSTM(WIDTH, WIDTH, 2),
    "own_affine": DecayedSum,
    "nested_affine": lambda: Stack([Dropout(0.3), Residual(Stack([MLSTM(WIDTH, WIDTH, 3), LSTM(WIDTH, WIDTH)]))]),
    "own_forward": NormedGRU,
    "hooked": hooked,
    "hooked_residual": lambda: Residual(hooked()),
    "integer": EverySecond,
    "lstm": lambda: LSTM(WIDTH, WIDTH, 2),
    "gru": lambda: Residual(GRU(WIDTH, WIDTH)),
    "weight_drop": lambda: WeightDropLSTM(WIDTH, WIDTH),
    "penalty": lambda: ActivationPenalty(WIDTH, activation=0.5, temporal=0.5),
    "dropout": lambda: Dropout(0.3),
    "locked": lambda: LockedDropout(0.3),
    "norm": lambda: LayerNorm(WIDTH),
    "mean": lambda: MeanPool(WIDTH),
    "max": lambda: MaxPool(WIDTH),
    "final": lambda: FinalStates(WIDTH),
    "conv": lambda: CausalConv(WIDTH, WIDTH, 3, 2),
    "frames": lambda: Stack([StackFrames(2), Linear(2 * WIDTH, WIDTH)]),
    "pool_time": lambda: PoolTime(3, "max"),
}


AFFINE = ("mingru", "minlstm", "mlstm", "own_affine", "nested_affine")
LOOKING_AHEAD = ("bilstm", "bilstm2", "bigru", "residual", "nested")


@dataclass(frozen=True)
class SpanCase:
    """A stack, by the names of its blocks, and the windows that it trains on."""

    blocks: tuple[str, ...]
    num_rows: int = 6
    window: int = 13
    is_ragged: bool = True
    is_tied: bool = False
    one_target_per_row: bool = False
    reset_rate: float = 0.0
    seed: int = 0
    num_steps: int = 2
    precision: Precision = "fp32"  # the weights are in float64, or else in float32

    def model(self) -> Stack:
        """Return the stack, on the CPU."""
        embedding = WordDropEmbedding(NUM_TOKENS, WIDTH, 0.2) if self.is_tied else Embedding(NUM_TOKENS, WIDTH)
        head = Linear(WIDTH, NUM_TOKENS)
        if self.is_tied:
            head.module.weight = embedding.module.weight
        stack = Stack([embedding, *(BLOCKS[name]() for name in self.blocks), head])
        return stack.double() if self.precision == "fp32" else stack

    def read(self, step: int, stride: int) -> Window:
        """Return the window of a step, with targets at the model's outputs."""
        generator = torch.Generator().manual_seed(self.seed * 31 + step)
        num_steps = int(torch.randint(1, self.window + 1, (), generator=generator))
        lengths = torch.full((self.num_rows,), num_steps)
        if self.is_ragged:
            lengths = torch.randint(0, num_steps + 1, (self.num_rows,), generator=generator)
        tokens = torch.randint(NUM_TOKENS, (num_steps, self.num_rows), generator=generator)
        num_outputs, output_lengths = -(-num_steps // stride), -(-lengths // stride)
        targets = torch.randint(NUM_TOKENS, (num_outputs, self.num_rows), generator=generator)
        times = torch.arange(num_outputs).unsqueeze(1)
        targets[times >= output_lengths] = -100
        if self.one_target_per_row:
            targets[times != output_lengths - 1] = -100
        fresh, resets = torch.ones(self.num_rows, dtype=torch.bool), None
        if self.reset_rate:
            resets = torch.rand(num_steps, self.num_rows, generator=generator) < self.reset_rate
        return Window(num_steps, torch.arange(self.num_rows), lengths, fresh, tokens, targets, resets)


@dataclass(frozen=True)
class SpanResult:
    """What some steps gave on one rank: the sums of the losses over all ranks, and this rank's gradients."""

    losses: list[float]
    evaluated: list[float]
    gradients: list[dict[str, Tensor]]


def run_spans(world: World, case: SpanCase, layout: Layout) -> SpanResult:
    """Take the steps of a case on this rank of a layout."""
    engine = make_engine(case.model(), CrossEntropy(), layout, world, seed=3, precision=case.precision)
    return _run(engine, case)


def run_alone(case: SpanCase) -> SpanResult:
    """Take the steps of a case on one device."""
    return _run(LocalEngine(initialize(case.model(), 3), CrossEntropy(), precision=case.precision), case)


def _run(engine: Engine, case: SpanCase) -> SpanResult:
    mesh, result = engine.mesh, SpanResult([], [], [])
    first, stop = (case.num_rows * (mesh.replica + index) // mesh.num_replicas for index in range(2))
    for step in range(case.num_steps):
        window = case.read(step, engine.stack.stride)[slice(first, stop)]
        step_result = engine.step(window, None, key=step)
        named = engine.stack.named_parameters()
        gradients = {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}
        result.gradients.append(gradients)
        evaluated = engine.eval_step(window, None, key=step)
        correct = 0 if evaluated.num_correct is None else evaluated.num_correct  # None on a rank without targets
        sums = [step_result.total, step_result.count, evaluated.total, correct]
        total, count, evaluated_total, num_correct = mesh.world.all_reduce([float(part) for part in sums])
        result.losses.append(total / max(count, 1))
        result.evaluated.extend([evaluated_total, num_correct])
    return result
