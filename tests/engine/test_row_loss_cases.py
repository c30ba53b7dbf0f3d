"""Cases of losses over whole rows that once went wrong: each was a finding of a review."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto import Layout, evaluate, make_engine
from stretto.base.errors import ConfigError, DataError
from stretto.blocks.loss_weights import attach_loss
from stretto.blocks.row_loss import RowLoss
from stretto.blocks.vocab_check import check_vocab_parallel
from stretto.data import Batches, Window, from_arrays
from stretto.measure.tied_blocks import find_tied_blocks
from stretto.nn import CRF, LSTM, ActivationPenalty, CrossEntropy, CTCLoss, Linear, LossSum, Stack, initialize
from stretto.testing import LocalEngine
from stretto.train import gather_model

NONE = -100


def window(targets: Tensor) -> Window:
    lengths = torch.tensor([6, 6])
    inputs = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(1))
    return Window(6, torch.arange(2), lengths, torch.ones(2, dtype=torch.bool), inputs, targets)


def model() -> Stack:
    return Stack([LSTM(3, 8), Linear(8, 4)])


def test_a_last_micro_batch_without_targets_keeps_the_gradients_of_the_others() -> None:
    targets = torch.tensor([[1, NONE], [2, NONE]])
    gradients = {}
    for name in ("local", "pipeline"):
        stack = initialize(model(), 3)
        engine: Any = LocalEngine(stack, CTCLoss(), micro_batches=2, precision="bf16")
        if name == "pipeline":
            engine = make_engine(stack, CTCLoss(), Layout(micro_batches=2), precision="bf16")
        engine.step(window(targets), None, 1)
        gradients[name] = {key: weight.grad for key, weight in stack.named_parameters()}
    for key, gradient in gradients["local"].items():
        torch.testing.assert_close(gradient, gradients["pipeline"][key], rtol=0.05, atol=1e-3)


def test_metrics_of_a_crf_see_the_most_likely_tags() -> None:
    generator = torch.Generator().manual_seed(2)
    items = from_arrays(torch.randn(6, 9, 3, generator=generator), torch.randint(4, (6, 9), generator=generator))
    crf = CRF(4)
    with torch.no_grad():
        crf.transitions.copy_(3 * torch.randn(4, 4, generator=generator))
    engine = make_engine(initialize(model(), 3), crf, Layout(chunks=2))
    evaluation = evaluate(engine, Batches(items, max_rows=6), metrics=["accuracy"])
    assert evaluation.accuracy == pytest.approx(evaluation.metrics["accuracy"])


def test_a_crf_refuses_tags_that_it_does_not_have() -> None:
    with pytest.raises(DataError, match="targets have the tag -1, but CRF has 4"):
        CRF(4)(torch.randn(2, 1, 4), torch.tensor([[1], [-1]]), torch.tensor([2]))


class ScaledLoss(RowLoss):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, y: Tensor, targets: Tensor, lengths: Tensor) -> LossSum:
        return LossSum(y.square().sum(), lengths.sum())


class TwiceTied(ScaledLoss):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2))
        self.b = self.a


def test_buffers_of_a_loss_are_saved_and_its_own_ties_are_no_blocks() -> None:
    assert "loss.scale" in attach_loss(model(), ScaledLoss()).state_dict()
    assert find_tied_blocks(attach_loss(model(), TwiceTied())) == ()


def test_the_gathered_model_has_the_weights_of_the_loss() -> None:
    stack = initialize(model(), 3)
    engine = make_engine(stack, CRF(4))
    assert "loss.transitions" in gather_model(engine, stack).state_dict()


def test_fp16_is_refused_with_a_penalty() -> None:
    stack = initialize(Stack([LSTM(3, 8), ActivationPenalty(8, activation=2.0), Linear(8, 4)]), 1)
    with pytest.raises(ConfigError, match=r"fp16.* use bf16"):
        make_engine(stack, CrossEntropy(), precision="fp16")


class HalfLinear(Linear):
    def forward(self, x: Tensor, state: Any) -> Any:  # noqa: ANN401
        y, state = super().forward(x, state)
        return y / 2, state


class HalfCrossEntropy(CrossEntropy):
    pass


def test_a_subclass_is_not_split() -> None:
    for last, loss in ((HalfLinear(8, 4), CrossEntropy()), (Linear(8, 4), HalfCrossEntropy())):
        with pytest.raises(ConfigError, match=r"layout\.vocab_parallel=true needs"):
            check_vocab_parallel(Stack([LSTM(3, 8), last]), loss, 2)
