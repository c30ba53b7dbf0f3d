import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from stretto import make_engine
from stretto.errors import ConfigError, DataError
from stretto.nn import (
    AbsoluteError,
    BinaryCrossEntropy,
    CrossEntropy,
    HuberLoss,
    Linear,
    Loss,
    LossSum,
    QuantileLoss,
    SquaredError,
    Stack,
    as_loss,
    last_step_targets,
)

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
    (CrossEntropy(), tokens),
    (CrossEntropy(), sequences),
    (CrossEntropy((0.5, 1, 2, 3, 0), label_smoothing=0.2), tokens),
    (HuberLoss(0.5), series),
    (BinaryCrossEntropy(), series),
    (as_loss(nn.NLLLoss()), tokens),
    (as_loss(nn.SmoothL1Loss()), series),
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


def test_cross_entropy_equals_torch_on_valid_targets() -> None:
    y, targets = tokens()
    loss = CrossEntropy()(y, targets)
    assert int(loss.count) == STEPS * ROWS - 2
    assert loss.total / loss.count == pytest.approx(float(F.cross_entropy(y.flatten(0, 1), targets.flatten())))


def test_the_loss_of_a_label_uses_the_last_valid_step_only() -> None:
    y, targets = sequences()
    loss = CrossEntropy()(y.requires_grad_(), targets)
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


def test_the_coverage_of_quantiles_is_a_sum_over_the_targets_that_are_not_missing() -> None:
    samples = torch.linspace(0, 1, 1001, dtype=torch.float64)
    samples[500] = torch.nan
    loss = QuantileLoss((0.2, 0.5, 0.9))
    # Quantiles that cross are sorted.
    y = torch.tensor([0.9, 0.5, 0.2], dtype=torch.float64).expand(1001, 3)
    num_covered, count = loss.coverage(y, samples)
    assert (int(num_covered), int(count)) == (701 - 1, 1000)
    parts = [loss.coverage(y[part], samples[part]) for part in (slice(0, 300), slice(300, None))]
    assert sum(int(covered) for covered, _ in parts) == int(num_covered)
    flat, targets = torch.zeros(4, 2, 6), torch.zeros(4, 2, 2)
    assert [int(number) for number in loss.coverage(flat, targets)] == [16, 16]


def test_bf16_outputs_are_summed_in_fp32() -> None:
    y, targets = tokens()
    assert CrossEntropy()(y.bfloat16(), targets).total.dtype == torch.float32


def test_impossible_losses_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantiles=\(0\.5, 1\.5\) are not all between 0 and 1"):
        QuantileLoss((0.5, 1.5))
    with pytest.raises(ConfigError, match="don't have 3 quantiles for each of the targets"):
        QuantileLoss()(torch.zeros(2, 3, 1), torch.zeros(2, 3))
    with pytest.raises(ConfigError, match="differ in shape"):
        SquaredError()(torch.zeros(2, 3, 1), torch.zeros(2, 3))
    with pytest.raises(ConfigError, match=r"not outputs \[2, 3, 1\] and floats \[2, 3\]; use SquaredError"):
        CrossEntropy()(torch.zeros(2, 3, 1), torch.zeros(2, 3))
    with pytest.raises(ConfigError, match="class_weights has 2 numbers, but the model has 3 outputs"):
        CrossEntropy((1, 2))(torch.zeros(2, 1, 3), torch.zeros(2, 1, dtype=torch.int64))


@pytest.mark.parametrize("loss", [CrossEntropy(), CrossEntropy((1, 2, 3), 0.1), as_loss(nn.NLLLoss())])
@pytest.mark.parametrize("wrong", [3, -1])
def test_targets_that_are_out_of_range_are_named(loss: Loss, wrong: int) -> None:
    targets = torch.tensor([[1], [-100], [wrong]])
    with pytest.raises(DataError, match=f"^targets have the class {wrong}, but the model has 3 outputs, counted from"):
        loss(torch.zeros(3, 1, 3), targets)


TORCH_CASES: list[tuple[nn.Module, Callable[[], tuple[Tensor, Tensor]]]] = [
    (nn.CrossEntropyLoss(), tokens),
    (nn.CrossEntropyLoss(torch.tensor([0.5, 1, 2, 3, 0.25]), label_smoothing=0.1), tokens),
    (nn.CrossEntropyLoss(ignore_index=3, reduction="none"), tokens),
    (nn.NLLLoss(torch.tensor([0.5, 1, 2, 3, 0.25]), ignore_index=2), tokens),
    (nn.MSELoss(), series),
    (nn.L1Loss(reduction="none"), series),
    (nn.SmoothL1Loss(beta=0.4), series),
    (nn.HuberLoss(delta=0.3), series),
    (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0, 1.0, 3.0])), series),
    (nn.PoissonNLLLoss(), series),
    (nn.SoftMarginLoss(), series),
]


@pytest.mark.parametrize(("module", "case"), TORCH_CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_torch_module_gives_its_own_mean_over_valid_targets(
    module: nn.Module, case: Callable[[], tuple[Tensor, Tensor]]
) -> None:
    torch.manual_seed(3)
    y, targets = case()
    y.requires_grad_()
    loss = as_loss(module)(y, targets)
    mean = loss.total / (loss.count if loss.weight is None else loss.weight)
    (gradient,) = torch.autograd.grad(mean, y)

    module = copy.deepcopy(module).double()
    setattr(module, "reduction", "mean")  # noqa: B010 - mypy thinks that it is a Module
    is_valid = targets != -100 if case is tokens else ~targets.isnan().any(-1)
    if case is series:  # torch has no missing values: drop their time steps, then those of one value
        y2, targets2 = y[is_valid], targets[is_valid]
        ours = as_loss(module)(y2, targets2)
        torch.testing.assert_close(ours.total / ours.count, module(y2, targets2), rtol=1e-12, atol=1e-12)
        assert int(loss.count) == int((~targets.isnan()).sum())
        assert gradient.isfinite().all() and not gradient[targets.isnan()].any()
        return
    expected = module(y[is_valid], targets[is_valid])
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)
    (expected_gradient,) = torch.autograd.grad(expected, y)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def mean_of_squares(y: Tensor, targets: Tensor) -> Tensor:
    return ((y - targets) ** 2).mean()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (mean_of_squares, r"mean_of_squares returned an object of type Tensor; return stretto\.nn\.LossSum\(total, "),
        (lambda y, targets: F.cross_entropy(y.flatten(0, 1), targets.flatten()), "<lambda> returned an object of"),
        (F.mse_loss, r"loss=mse_loss returns a mean or a Tensor; use the module for it, such as nn\.MSELoss\(\)"),
        (nn.MSELoss, r"loss=MSELoss is a class; create it: MSELoss\(\)"),
        (nn.MSELoss(reduction="sum"), "MSELoss has reduction='sum', but .* use reduction='mean'"),
        (nn.CosineEmbeddingLoss(), "loss=CosineEmbeddingLoss is not one of CrossEntropyLoss, .*; write a function of"),
        (3, "loss is an object of type int, not a function"),
    ],
)
def test_a_loss_that_is_no_sum_is_refused_before_the_first_step(loss: Loss, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(Stack([Linear(2, 2)]), loss, seed=1)


class OwnLoss(_Loss):
    """A user's loss, as a subclass of what torch's own losses are subclasses of."""

    def forward(self, y: Tensor, targets: Tensor) -> LossSum:
        return LossSum((y - targets).square().sum(), torch.tensor(targets.numel()))


def test_a_users_subclass_of_a_torch_loss_may_return_a_sum() -> None:
    y, targets = torch.ones(2, 3, 1), torch.zeros(2, 3, 1)
    result = as_loss(OwnLoss())(y, targets)
    assert (result.total.item(), result.count.item()) == (6.0, 6)


@pytest.mark.parametrize("device", ["cpu", "meta"])  # the second needs a copy of the weights
@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss, nn.BCEWithLogitsLoss])
def test_weights_that_were_first_used_in_inference_mode_can_be_trained_with(kind: type[nn.Module], device: str) -> None:
    checked = as_loss(kind(torch.ones(5)))
    y = torch.randn(STEPS, ROWS, 5, device=device, requires_grad=True)
    classes = torch.zeros(STEPS, ROWS, dtype=torch.int64, device=device)
    targets = torch.zeros_like(y) if kind is nn.BCEWithLogitsLoss else classes
    with torch.inference_mode():
        checked(y.detach(), targets)
    (gradient,) = torch.autograd.grad(checked(y, targets).total, [y])
    assert gradient.shape == y.shape


def test_a_loss_that_fails_on_made_up_numbers_is_checked_in_the_first_step() -> None:
    def only_five_wide(y: Tensor, targets: Tensor) -> Tensor:
        return y[..., 4].sum()

    loss = as_loss(only_five_wide)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="only_five_wide returned an object of type Tensor"):
        loss(torch.zeros(2, 2, 5), torch.zeros(2, 2))


def test_training_does_not_count_correct_predictions_and_evaluation_does() -> None:
    y, targets = tokens()
    assert CrossEntropy()(y, targets).num_correct is None
    with torch.no_grad():
        num_correct = CrossEntropy()(y, targets).num_correct
        assert num_correct is not None and int(num_correct) == int((y.argmax(-1) == targets).sum())
        y, targets = series()
        num_correct = BinaryCrossEntropy()(y, (targets > 0).double().where(~targets.isnan(), torch.nan)).num_correct
        assert num_correct is not None and int(num_correct) == int(((y > 0) == (targets > 0))[~targets.isnan()].sum())


def test_quantiles_may_be_flat() -> None:
    y, targets = quantiles()
    torch.testing.assert_close(QuantileLoss()(y.flatten(-2), targets).total, QuantileLoss()(y, targets).total)


def test_an_evaluation_does_not_smooth_labels() -> None:
    y, targets = torch.randn(3, 2, 5), torch.tensor([[0, 4], [-100, 2], [1, 3]])
    smoothed, plain = CrossEntropy(label_smoothing=0.2), CrossEntropy()
    assert smoothed(y, targets).total != plain(y, targets).total
    with torch.no_grad():
        assert torch.equal(smoothed(y, targets).total, plain(y, targets).total)
