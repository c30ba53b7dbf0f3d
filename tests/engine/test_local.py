"""LocalEngine: micro-batches, carried state, lengths and precision on one device."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stretto.base.state import State
from stretto.data import Corpus, Lanes, Position, Window
from stretto.errors import ConfigError, DataError
from stretto.nn import (
    GRU,
    LSTM,
    BidirectionalLSTM,
    CrossEntropy,
    Dropout,
    Embedding,
    Linear,
    LockedDropout,
    Stack,
    initialize,
    last_step_targets,
)
from stretto.testing import LocalEngine

LOSS = CrossEntropy()


def model(num_tokens: int = 256) -> Stack:
    blocks = [
        Embedding(num_tokens, 8),
        Dropout(0.2),
        LSTM(8, 10),
        LockedDropout(0.2),
        GRU(10, 8),
        Linear(8, num_tokens),
    ]
    return initialize(Stack(blocks).double(), seed=3)


def gradients(stack: Stack) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in stack.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("micro_batches", [2, 3, 7])
def test_micro_batches_change_neither_loss_nor_gradient_nor_state(micro_batches: int, byte_corpus: Corpus) -> None:
    data = Lanes(byte_corpus, 7, 13)
    results = []
    for engine in (LocalEngine(model(), LOSS), LocalEngine(model(), LOSS, micro_batches=micro_batches)):
        state: State | None = None
        for position in range(3):
            result = engine.step(data.read(data.position(position)), state, key=position)
            state = result.state
        results.append((result, gradients(engine.stack), float(engine.squared_grad_norm())))
    (whole, expected, norm), (split, actual, split_norm) = results
    torch.testing.assert_close(split.total, whole.total, rtol=1e-12, atol=0)
    assert int(split.count) == int(whole.count) == 7 * 13
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(split.state, whole.state, rtol=1e-12, atol=1e-14)
    assert split_norm == pytest.approx(norm, rel=1e-11)


def test_two_windows_with_carried_state_have_the_loss_of_one_long_window(byte_corpus: Corpus) -> None:
    engine = LocalEngine(model(), CrossEntropy())
    long, short = Lanes(byte_corpus, 5, 24), Lanes(byte_corpus, 5, 12)
    first = engine.eval_step(short.read(short.position(0)), None, key=0)
    second = engine.eval_step(short.read(short.position(1)), first.state, key=0)
    whole = engine.eval_step(long.read(long.position(0)), None, key=0)
    torch.testing.assert_close(first.total + second.total, whole.total, rtol=1e-12, atol=0)
    forgotten = engine.eval_step(short.read(short.position(1)), None, key=0)
    assert abs(float(forgotten.total - second.total)) > 1e-3, "without the carried state the loss differs"


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_row_that_ends_within_a_window_leaves_the_initial_state(micro_batches: int, byte_corpus: Corpus) -> None:
    window = Lanes(byte_corpus, 4, 12).read(Position())
    engine = LocalEngine(model(), CrossEntropy(), micro_batches=micro_batches)
    state = engine.step(replace(window, lengths=torch.tensor([12, 5, 12, 0])), None, 1).state
    whole = engine.step(window, None, 1).state
    initial = engine.stack.begin(window.rows(1, engine.mesh.world.device, torch.float64))
    for actual, full, start in zip(state, whole, initial, strict=True):
        assert torch.equal(actual[[0, 2]], full[[0, 2]])
        assert torch.equal(actual[[1, 3]], start[[1, 3]])


def test_evaluation_in_micro_batches_gives_the_same_loss(byte_corpus: Corpus) -> None:
    window = Lanes(byte_corpus, 5, 12).read(Position())
    results = [
        LocalEngine(model(), CrossEntropy(), micro_batches=micro_batches).eval_step(window, None, 0)
        for micro_batches in (1, 3)
    ]
    torch.testing.assert_close(results[0].total, results[1].total, rtol=1e-12, atol=0)
    torch.testing.assert_close(results[0].state, results[1].state, rtol=1e-12, atol=1e-14)


def test_a_step_depends_on_its_key_and_an_evaluation_does_not(byte_corpus: Corpus) -> None:
    engine, window = LocalEngine(model(), CrossEntropy()), Lanes(byte_corpus, 5, 12).read(Position())
    assert float(engine.step(window, None, 1).total) == float(engine.step(window, None, 1).total)
    assert float(engine.step(window, None, 1).total) != float(engine.step(window, None, 2).total)
    assert float(engine.eval_step(window, None, 1).total) == float(engine.eval_step(window, None, 2).total)
    assert not engine.eval_step(window, None, 1).total.requires_grad


def test_rows_of_different_lengths_give_the_sum_of_each_row_alone() -> None:
    lengths, labels = torch.tensor([6, 1, 4, 3]), torch.tensor([0, 2, 1, 2])
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    stack = initialize(Stack([Linear(3, 5), BidirectionalLSTM(5, 4), LSTM(8, 4), Linear(4, 3)]).double(), 1)
    targets = last_step_targets(labels, lengths, 6)
    window = Window(6, torch.arange(4), lengths, torch.ones(4, dtype=torch.bool), x, targets)
    engine = LocalEngine(stack, CrossEntropy(), micro_batches=2)
    result = engine.step(window, None, 0)
    together = gradients(stack)
    alone: dict[str, Tensor] = {}
    total = 0.0
    for row, length in enumerate(lengths.tolist()):
        rows = slice(row, row + 1)
        part = replace(window[rows], num_steps=length, inputs=x[:length, rows], targets=targets[:length, rows])
        total += float(LocalEngine(stack, CrossEntropy()).step(part, None, 0).total)
        for name, gradient in gradients(stack).items():
            alone[name] = alone.get(name, torch.zeros(())) + gradient
    assert float(result.total) == pytest.approx(total, rel=1e-12)
    assert int(result.count) == 4
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-12)


def test_bf16_runs_near_fp32_and_keeps_weights_and_states_in_fp32(byte_corpus: Corpus) -> None:
    window = Lanes(byte_corpus, 8, 16).read(Position())
    totals = []
    for precision in ("fp32", "bf16"):
        stack = initialize(Stack([Embedding(256, 32), LSTM(32, 32, 2), Linear(32, 256)]), seed=3)
        engine = LocalEngine(stack, CrossEntropy(), precision=precision)
        result = engine.step(window, None, 0)
        totals.append(float(result.total))
        assert all(tensor.dtype == torch.float32 for tensor in result.state)
        assert all(gradient.dtype == torch.float32 for gradient in gradients(stack).values())
    assert totals[0] != totals[1], "autocast had no effect"
    # bf16 keeps 8 bits: a loss near log(256) is right to about a part in 2^8.
    assert totals[1] == pytest.approx(totals[0], rel=2**-8)


def test_invalid_engines_are_refused(byte_corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match="micro_batches=0"):
        LocalEngine(model(), CrossEntropy(), micro_batches=0)
    with pytest.raises(ConfigError, match="exceeds the batch's number of rows; use at most 3"):
        LocalEngine(model(), CrossEntropy(), micro_batches=4).step(Lanes(byte_corpus, 3, 5).read(Position()), None, 0)
    with pytest.raises(ConfigError, match="precision='fp8' is not supported; use fp32, bf16 or fp16"):
        LocalEngine(model(), CrossEntropy(), precision="fp8")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="has no inputs, which this rank needs"):
        LocalEngine(model(), CrossEntropy()).step(Lanes(byte_corpus, 3, 5).read(Position(), inputs=False), None, 0)
    with torch.device("meta"):
        stack = Stack([Linear(2, 2)])
    with pytest.raises(ConfigError, match=r"stretto\.nn\.initialize"):
        LocalEngine(stack, CrossEntropy())
