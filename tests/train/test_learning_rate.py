"""The learning rate over a run, as a fraction of its peak."""

import math

import pytest
import torch

from stretto import TrainConfig
from stretto.train.schedule import learning_rate_factor

STEPS = 100


def factors(**fields: object) -> list[float]:
    config = TrainConfig.model_validate(fields)
    return [learning_rate_factor(config, step, step / STEPS) for step in range(STEPS + 1)]


def test_the_learning_rate_warms_up_and_decays_along_a_cosine() -> None:
    rates = factors(warmup=4)
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0], rel=3e-3)
    assert rates[50] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_a_linear_schedule_decays_along_a_line() -> None:
    rates = factors(schedule="linear", final_lr_ratio=0.2)
    assert rates == pytest.approx([1 - 0.8 * step / STEPS for step in range(STEPS + 1)])
    assert factors(schedule="linear", warmup=10)[4] == pytest.approx(0.5 * (1 - 0.9 * 0.04))


def test_an_inverse_square_root_starts_after_the_warmup() -> None:
    rates = factors(schedule="inverse_sqrt", warmup=25)
    assert rates[:25] == pytest.approx([(step + 1) / 25 for step in range(25)])
    assert rates[24:] == pytest.approx([5 / math.sqrt(step + 1) for step in range(24, STEPS + 1)])
    assert factors(schedule="inverse_sqrt")[:4] == pytest.approx([1, 2**-0.5, 3**-0.5, 0.5])
    assert min(factors(schedule="inverse_sqrt", final_lr_ratio=0.3)) == 0.3


def test_one_cycle_is_that_of_torch() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=STEPS + 1, final_div_factor=math.inf)
    expected = []
    for _ in range(STEPS):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    # Torch's peak is a step earlier, as it counts from the first step to the last.
    assert factors(schedule="one_cycle")[:STEPS] == pytest.approx(expected, abs=0.03)
    assert factors(schedule="one_cycle", final_lr_ratio=0.1)[-1] == pytest.approx(0.1)


def test_a_plateau_lowers_the_rate_with_each_reduction() -> None:
    config = TrainConfig(schedule="plateau", plateau_factor=0.2, final_lr_ratio=0.01, warmup=2)
    assert [learning_rate_factor(config, 5, 0.5, reductions) for reductions in range(4)] == pytest.approx(
        [1, 0.2, 0.04, 0.01]
    )
    assert learning_rate_factor(config, 0, 0.0, 1) == pytest.approx(0.1)


def test_a_constant_schedule_only_warms_up() -> None:
    config = TrainConfig(schedule="constant", warmup=2)
    assert [learning_rate_factor(config, step, step / 10) for step in (0, 1, 2, 9)] == [0.5, 1, 1, 1]
