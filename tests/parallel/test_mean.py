"""global_mean: under DDP, gradients are those of the mean over all targets, however they are spread over ranks."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from helpers.rank_pool import RankPools
from stretto import World, global_mean

COUNTS = (7, 0, 3)  # targets of each rank


def gradient(world: World, num_parts: int) -> torch.Tensor:
    """Return the gradient of a step with this rank's targets, in parts."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1).double(), torch.randn(10, 4, dtype=torch.float64)
    wrapped = DistributedDataParallel(model)
    first = sum(COUNTS[: world.rank])
    own = x[first : first + COUNTS[world.rank]]
    for index, part in enumerate(own.tensor_split(num_parts)):
        wrapped.require_backward_grad_sync = index == num_parts - 1
        loss = global_mean(wrapped(part).square().sum(), len(own))
        loss.backward()  # type: ignore[no-untyped-call]
    assert model.weight.grad is not None
    return model.weight.grad


def test_gradients_are_those_of_the_mean_over_all_targets(pools: RankPools) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1).double(), torch.randn(10, 4, dtype=torch.float64)
    global_mean(model(x).square().sum(), 10).backward()  # type: ignore[no-untyped-call]
    expected = model.weight.grad
    assert expected is not None
    for num_parts in (1, 3):
        for found in pools[3].run(gradient, num_parts):
            assert torch.allclose(found, expected, rtol=1e-12)


def test_without_targets_the_loss_is_zero() -> None:
    assert global_mean(torch.zeros(()), 0) == 0
