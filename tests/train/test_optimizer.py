import pytest
import torch
from torch import nn

from stretto import TrainConfig
from stretto.train.optimizer import (
    learning_rate_factor,
    make_optimizer,
    optimizer_factory,
    scale_gradients,
    set_learning_rate,
)


def test_the_learning_rate_warms_up_and_decays_along_a_cosine() -> None:
    config = TrainConfig(warmup=4, final_lr_ratio=0.1)
    rates = [learning_rate_factor(config, step, step / 100) for step in range(101)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0], rel=3e-3)
    assert rates[50] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_a_constant_schedule_only_warms_up() -> None:
    config = TrainConfig(schedule="constant", warmup=2)
    assert [learning_rate_factor(config, step, step / 10) for step in (0, 1, 2, 9)] == [0.5, 1, 1, 1]


def test_the_schedule_scales_the_rate_of_each_parameter_group() -> None:
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    groups = [{"params": [weights[0]], "lr": 0.1}, {"params": [weights[1]], "lr": 0.01}]
    optimizer = make_optimizer(lambda _: torch.optim.SGD(groups), weights)
    for factor in (0.5, 1.0):
        assert set_learning_rate(optimizer, factor) == 0.1 * factor
        assert [group["lr"] for group in optimizer.param_groups] == [0.1 * factor, 0.01 * factor]


@pytest.mark.parametrize(
    ("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD), ("asgd", torch.optim.ASGD)]
)
def test_the_named_optimizer_updates_weights(name: str, kind: type[torch.optim.Optimizer]) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = optimizer_factory(TrainConfig.model_validate({"optimizer": name, "lr": 0.1}))([weight])
    assert isinstance(optimizer, kind)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert (weight < 1).all()


@pytest.mark.parametrize(
    ("values", "setting"),
    [
        ({"optimizer": "sgd", "momentum": 0.7}, ("momentum", 0.7)),
        ({"optimizer": "sgd", "weight_decay": 0.2}, ("weight_decay", 0.2)),
        ({"optimizer": "asgd", "weight_decay": 0.2}, ("weight_decay", 0.2)),
        ({"optimizer": "asgd", "average_from": 9}, ("t0", 7)),
        ({"optimizer": "asgd"}, ("lambd", 0.0)),
        ({"beta1": 0.8, "beta2": 0.95}, ("betas", (0.8, 0.95))),
        ({"weight_decay": 0.2}, ("weight_decay", 0.2)),
    ],
)
def test_the_config_sets_the_options_of_an_optimizer(values: dict[str, object], setting: tuple[str, object]) -> None:
    optimizer = optimizer_factory(TrainConfig.model_validate(values))([nn.Parameter(torch.ones(3))])
    assert optimizer.param_groups[0][setting[0]] == setting[1]


@pytest.mark.parametrize("name", ["adamw", "sgd", "asgd"])
def test_a_stage_without_weights_has_an_optimizer_that_steps_and_knows_its_rate(name: str) -> None:
    optimizer = make_optimizer(optimizer_factory(TrainConfig.model_validate({"optimizer": name, "lr": 0.1})), [])
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
