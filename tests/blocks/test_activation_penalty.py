"""The gradient of the penalties is that of their formula, in chunks, with rows of different lengths."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.reference_cells import lstm
from stretto.base.task import Task
from stretto.blocks.network import build_network
from stretto.config.model import ModelConfig
from stretto.config.toml import parse_config
from stretto.data import Window
from stretto.errors import ConfigError
from stretto.nn import ActivationPenalty, CrossEntropy, Rows, initialize
from stretto.testing import LocalEngine, check_chunk_law


def penalty(x: Tensor, lengths: list[int], activation: float, temporal: float) -> Tensor:
    """The formula, row by row."""
    total = torch.zeros((), dtype=x.dtype)
    for row, length in enumerate(lengths):
        steps = x[:length, row]
        total = total + activation * steps.square().mean(dim=-1).sum()
        total = total + temporal * (steps[1:] - steps[:-1]).square().mean(dim=-1).sum()
    return total


@pytest.mark.parametrize("cuts", [[6], [1, 5], [2, 2, 1, 1]], ids=str)
@pytest.mark.parametrize(("activation", "temporal"), [(2.0, 0.0), (0.0, 1.0), (2.0, 1.0)])
def test_the_gradient_is_that_of_the_formula(cuts: list[int], activation: float, temporal: float) -> None:
    lengths = [6, 1, 4, 0]
    block = ActivationPenalty(3, activation=activation, temporal=temporal)
    x = torch.randn(6, 4, 3, dtype=torch.float64, requires_grad=True)
    state = block.begin(replace(Rows.of(4, dtype=torch.float64), lengths=torch.tensor(lengths)))
    outputs = []
    for chunk in torch.split(x, cuts):
        y, state = block(chunk, state)
        outputs.append(y)
    y = torch.cat(outputs)
    assert torch.equal(y, x)
    torch.autograd.backward((5 * y).sum())
    expected = x.detach().clone().requires_grad_()
    torch.autograd.backward((5 * expected).sum() + penalty(expected, lengths, activation, temporal))
    torch.testing.assert_close(x.grad, expected.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("beyond", [0, 1, 7, 2**40], ids="beyond={}".format)
def test_rows_that_continue_in_other_windows_have_the_penalty_of_the_whole_row(beyond: int) -> None:
    """Windows of 3 time steps; a row's length in a window is that window's part of it, or any number beyond it."""
    lengths, window, width = [9, 7, 3, 4, 0], 3, 2
    block = ActivationPenalty(width, activation=2.0, temporal=1.0)
    x = torch.randn(9, 5, width, dtype=torch.float64, requires_grad=True)
    state, outputs = None, []
    for start in range(0, 9, window):
        left = torch.tensor([max(0, length - start) for length in lengths])
        rows = replace(
            Rows.of(5, dtype=torch.float64),
            lengths=torch.where(left > window, window + beyond, left),
            fresh=torch.full((5,), start == 0),
        )
        state = block.begin(rows, state)
        for chunk in torch.split(x[start : start + window], 2):
            y, state = block(chunk, state)
            outputs.append(y)
    torch.autograd.backward(torch.cat(outputs).sum())
    expected = x.detach().clone().requires_grad_()
    torch.autograd.backward(expected.sum() + penalty(expected, lengths, 2.0, 1.0))
    torch.testing.assert_close(x.grad, expected.grad, rtol=1e-12, atol=1e-12)


def test_a_row_that_starts_anew_after_a_short_one_has_its_whole_penalty() -> None:
    """An engine resets the state of a row that has ended, with the length that it had; the next may be longer."""
    block = ActivationPenalty(2, activation=2.0)
    ended = block.initial_state(replace(Rows.of(1, dtype=torch.float64), lengths=torch.tensor([1])))
    rows = replace(Rows.of(1, 3, dtype=torch.float64), fresh=torch.tensor([False]))
    x = torch.randn(3, 1, 2, dtype=torch.float64, requires_grad=True)
    y, _ = block(x, block.begin(rows, ended))
    torch.autograd.backward(y.sum())
    torch.testing.assert_close(x.grad, 1 + 2 * x.detach(), rtol=1e-12, atol=1e-12)


def test_the_penalty_keeps_the_chunk_law() -> None:
    check_chunk_law(ActivationPenalty(3, activation=2.0, temporal=1.0), torch.randn(6, 4, 3, dtype=torch.float64))


def test_evaluations_have_no_penalty() -> None:
    block, x = ActivationPenalty(3, activation=2.0, temporal=1.0).eval(), torch.randn(6, 4, 3, requires_grad=True)
    y, _ = block(x, block.begin(Rows.of(4)))
    torch.autograd.backward(y.sum())
    assert x.grad is not None and torch.equal(x.grad, torch.ones_like(x))


def test_a_wrong_weight_is_named() -> None:
    with pytest.raises(ConfigError, match="ActivationPenalty temporal=-1 must be finite and at least 0"):
        ActivationPenalty(3, temporal=-1)
    with pytest.raises(ConfigError, match=r"run.precision='fp16' scales the loss, but not model.activation_penalty"):
        parse_config({"data": {"train": "x"}, "model": {"activation_penalty": 2.0}, "run": {"precision": "fp16"}})


AWD = {
    "weight_dropout": 0.5,
    "embedding_dropout": 0.1,
    "dropout": 0.3,
    "activation_penalty": 2.0,
    "temporal_penalty": 1.0,
}


def test_a_config_builds_the_word_model() -> None:
    names = [
        type(block).__name__
        for block in build_network(ModelConfig.model_validate({"hidden": 8, **AWD}), Task.language(11))
    ]
    assert names == [
        "WordDropEmbedding", "LockedDropout", "WeightDropLSTM", "LockedDropout", "WeightDropLSTM", "ActivationPenalty",
        "LockedDropout", "ActivationPenalty", "Linear",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"weight_dropout=0.5 needs cell='lstm' in one direction; remove it"):
        parse_config({"data": {"train": "x"}, "model": {"weight_dropout": 0.5, "cell": "gru"}})


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_word_model_without_dropout_is_that_of_the_reference(micro_batches: int) -> None:
    """Loss, penalties and gradients of a model of plain tensor operations with the same weights."""
    torch.manual_seed(4)
    num_tokens, width, num_rows, num_steps = 17, 6, 4, 9
    config = ModelConfig(hidden=10, embedding=width, projection=width, activation_penalty=2.0, temporal_penalty=1.0)
    stack = initialize(build_network(config, Task.language(num_tokens)).double(), seed=2)
    tokens = torch.randint(num_tokens, (num_rows, num_steps + 1))
    rows = Rows.of(num_rows, num_steps)
    window = Window(num_steps, rows.lanes, rows.lengths, rows.fresh, tokens[:, :-1].T, tokens[:, 1:].T)
    engine = LocalEngine(stack, CrossEntropy(), micro_batches=micro_batches)
    result = engine.step(window, None, key=0)
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in stack.named_parameters()}
    x = weights["blocks.0.module.weight"][tokens[:, :-1].T]
    for block in (1, 2):
        cell = {name.split("cell.")[1]: weight for name, weight in weights.items() if f"blocks.{block}.cell" in name}
        zeros = [torch.zeros(num_rows, size, dtype=torch.float64) for size in (width, 10)]
        x, _, _ = lstm(x, zeros[0], zeros[1], cell, 0)
    head = f"blocks.{len(stack) - 1}.module"
    logits = x @ weights[f"{head}.weight"].T + weights[f"{head}.bias"]
    targets = tokens[:, 1:].T
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert float(result.total) == pytest.approx(float(loss.detach()), rel=1e-9)
    torch.autograd.backward(loss + penalty(x, [num_steps] * num_rows, 2.0, 1.0))
    for name, weight in stack.named_parameters():
        torch.testing.assert_close(weight.grad, weights[name].grad, rtol=1e-9, atol=1e-9)
