from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.errors import ConfigError
from stretto.nn import AbsoluteError, Loss, QuantileLoss, SequenceLoss, SquaredError, TokenLoss, last_step_targets

STEPS, ROWS = 6, 4


def tokens() -> tuple[Tensor, Tensor]:
    targets = torch.randint(5, (STEPS, ROWS))
    targets[4:, 1] = -100
    return torch.randn(STEPS, ROWS, 5, dtype=torch.float64), targets


def sequences() -> tuple[Tensor, Tensor]:
    labels, lengths = torch.tensor([3, 1, 4, 0]), torch.tensor([6, 2, 1, 0])
    return torch.randn(STEPS, ROWS, 5, dtype=torch.float64), last_step_targets(labels, lengths, STEPS)


def series() -> tuple[Tensor, Tensor]:
    targets = torch.randn(STEPS, ROWS, 3, dtype=torch.float64)
    targets[2, 1, 0] = targets[5] = torch.nan
    return torch.randn(STEPS, ROWS, 3, dtype=torch.float64), targets


def quantiles() -> tuple[Tensor, Tensor]:
    y, targets = series()
    return y.unsqueeze(-1) + torch.randn(3, dtype=torch.float64), targets


CASES: list[tuple[Loss, Callable[[], tuple[Tensor, Tensor]]]] = [
    (TokenLoss(), tokens),
    (SequenceLoss(), sequences),
    (SquaredError(), series),
    (AbsoluteError(), series),
    (QuantileLoss(), quantiles),
]


@pytest.mark.parametrize(("loss", "case"), CASES)
def test_the_losses_of_parts_of_a_batch_sum_to_that_of_the_batch(
    loss: Loss, case: Callable[[], tuple[Tensor, Tensor]]
) -> None:
    y, targets = case()
    whole = loss(y.requires_grad_(), targets)
    (gradient,) = torch.autograd.grad(whole.total, y)
    parts = [loss(y[s, r], targets[s, r]) for s in (slice(0, 4), slice(4, 6)) for r in (slice(0, 1), slice(1, 4))]
    total = torch.stack([part.total for part in parts]).sum()
    torch.testing.assert_close(total, whole.total, rtol=1e-12, atol=1e-12)
    assert sum(int(part.count) for part in parts) == int(whole.count) > 0
    (by_parts,) = torch.autograd.grad(total, y)
    torch.testing.assert_close(by_parts, gradient, rtol=1e-12, atol=1e-12)
    assert gradient.isfinite().all()


def test_the_token_loss_equals_torch_on_valid_targets() -> None:
    y, targets = tokens()
    loss = TokenLoss()(y, targets)
    assert int(loss.count) == STEPS * ROWS - 2
    assert loss.total / loss.count == pytest.approx(float(F.cross_entropy(y.flatten(0, 1), targets.flatten())))


def test_the_sequence_loss_uses_the_last_valid_step_only() -> None:
    y, targets = sequences()
    loss = SequenceLoss()(y.requires_grad_(), targets)
    last_outputs = torch.stack([y[5, 0], y[1, 1], y[0, 2]])
    expected = F.cross_entropy(last_outputs, torch.tensor([3, 1, 4]), reduction="sum")
    torch.testing.assert_close(loss.total, expected)
    assert int(loss.count) == 3
    (gradient,) = torch.autograd.grad(loss.total, y)
    assert (gradient.abs().sum(-1) > 0).nonzero().tolist() == [[0, 2], [1, 1], [5, 0]]


def test_series_losses_leave_out_missing_targets() -> None:
    y, targets = series()
    is_valid = ~targets.isnan()
    for loss, expected in (
        (SquaredError(), F.mse_loss(y[is_valid], targets[is_valid], reduction="sum")),
        (AbsoluteError(), F.l1_loss(y[is_valid], targets[is_valid], reduction="sum")),
    ):
        loss_sum = loss(y, targets)
        torch.testing.assert_close(loss_sum.total, expected)
        assert int(loss_sum.count) == int(is_valid.sum())


def test_the_quantile_loss_is_least_at_the_quantile() -> None:
    samples = torch.linspace(0, 1, 1001, dtype=torch.float64)
    loss = QuantileLoss((0.2, 0.9))
    totals = {
        guess: loss(torch.tensor(guess, dtype=torch.float64).expand(1001, 2), samples).total.item()
        for guess in ((0.2, 0.9), (0.3, 0.9), (0.2, 0.8), (0.1, 0.95))
    }
    assert min(totals, key=lambda guess: totals[guess]) == (0.2, 0.9)


def test_bf16_outputs_are_summed_in_fp32() -> None:
    y, targets = tokens()
    assert TokenLoss()(y.bfloat16(), targets).total.dtype == torch.float32


def test_impossible_losses_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantiles=\(0\.5, 1\.5\) are not all between 0 and 1"):
        QuantileLoss((0.5, 1.5))
    with pytest.raises(ConfigError, match="plus a last dim of 3 quantiles; add it to the last block's outputs"):
        QuantileLoss()(torch.zeros(2, 3, 1), torch.zeros(2, 3))
    with pytest.raises(ConfigError, match="differ in shape"):
        SquaredError()(torch.zeros(2, 3, 1), torch.zeros(2, 3))
