import pytest
import torch
from torch import nn

from stretto import TrainConfig, World
from stretto.train.optimizer import make_named_optimizer, make_optimizer, scale_gradients
from stretto.train.schedule import set_learning_rate


def test_the_schedule_scales_the_rate_of_each_parameter_group() -> None:
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    groups = [{"params": [weights[0]], "lr": 0.1}, {"params": [weights[1]], "lr": 0.01}]
    optimizer = make_optimizer(lambda _: torch.optim.SGD(groups), weights)
    for factor in (0.5, 1.0):
        assert set_learning_rate(optimizer, factor) == 0.1 * factor
        assert [group["lr"] for group in optimizer.param_groups] == [0.1 * factor, 0.01 * factor]


def test_a_stage_without_weights_has_an_optimizer_that_steps_and_knows_its_rate() -> None:
    world = World(0, 1, torch.device("cpu"))
    for name in ("adamw", "sgd", "adafactor"):
        optimizer = make_named_optimizer(TrainConfig(optimizer=name, lr=0.1), [], world)
        optimizer.step()
        assert set_learning_rate(optimizer, 0.5) == 0.05
    assert scale_gradients([], 2.0, 3.0, 1.0) == 1.5


@pytest.mark.parametrize("clip", [0.0, 0.5, 100.0])
def test_a_summed_gradient_becomes_a_clipped_mean(clip: float) -> None:
    weights = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5))]
    mean = [torch.randn_like(weight) for weight in weights]
    for weight, gradient in zip(weights, mean, strict=True):
        weight.grad = gradient * 7
    norm = float(torch.nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None]))
    returned_norm = scale_gradients(weights, 7, norm, clip)
    expected = [nn.Parameter(weight.detach()) for weight in weights]
    for weight, gradient in zip(expected, mean, strict=True):
        weight.grad = gradient.clone()
    mean_norm = torch.nn.utils.clip_grad_norm_(expected, clip or torch.inf)
    assert returned_norm == pytest.approx(float(mean_norm), rel=1e-5)
    torch.testing.assert_close([w.grad for w in weights], [w.grad for w in expected], rtol=1e-5, atol=1e-7)
