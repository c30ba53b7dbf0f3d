"""stretto.verify: the module law, checked on the user's own module and data."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import stretto
from helpers.patterns import (
    Attention,
    DecodeLoop,
    Frozen,
    KeptState,
    LastStep,
    Mixed,
    PackedWithState,
    ResidualStack,
    TiedWeights,
    TwoHeads,
    values,
)
from helpers.rank_pool import RankPools
from stretto import World
from stretto.errors import ConfigError
from stretto.parallel import Comparison
from stretto.parallel.layout import Layout
from stretto.parallel.stage import RnnStage

ROWS = {2: (5, 4), 3: (3, 0, 6)}  # of each rank


def loss_of(module: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    """Return a sum, which an empty rank has, too."""
    outputs = module(*inputs)
    outputs = outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, tuple) else [outputs]
    return torch.stack([(output * output.cos()).sum() for output in outputs]).sum()


def make(pattern: Callable[[], Any], layout: Layout | None = None) -> Any:  # noqa: ANN401
    torch.manual_seed(0)
    return stretto.parallelize(pattern(), layout or Layout(2, 3))


def own_rows(world: World) -> slice:
    rows = ROWS[world.size]
    return slice(sum(rows[: world.rank]), sum(rows[: world.rank + 1]))


def verify_patterns(world: World) -> dict[str, Comparison]:
    results = {}
    for pattern in (DecodeLoop, Frozen, KeptState, LastStep, Mixed, PackedWithState, TiedWeights, TwoHeads):
        module = make(pattern, Layout(3, 3))
        results[pattern.__name__] = stretto.verify(module, module.inputs(own_rows(world)), loss_of)
    return results


def test_patterns_are_equal_also_where_a_rank_has_no_rows(pools: RankPools) -> None:
    for results in pools[3].run(verify_patterns):
        assert {name: str(result) for name, result in results.items() if not result.is_equal} == {}
        assert all(result.is_shared for result in results.values())
        assert results["DecodeLoop"].local == ("decoder (no call has gradients and at least 6 steps)",)
        assert results["LastStep"].verdict == "the parallelized module equals your own on one device"


def verify_broken(world: World, part: str) -> Comparison:
    """Let the region of `layers.1`, a GRU, be wrong on rank 1."""
    run = RnnStage.run

    def broken(self: RnnStage, steps: Tensor, chunk: Any, state: Any) -> Any:  # noqa: ANN401
        if world.rank == 1 and isinstance(self._rnn, nn.GRU):
            if part == "state":
                state = tuple(tensor + 1e-3 for tensor in state)
            else:
                steps = steps + 1e-3 * (steps - steps.detach())
        return run(self, steps, chunk, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RnnStage, "run", broken)
        module = make(ResidualStack)
        return stretto.verify(module, module.inputs(own_rows(world)), loss_of)


@pytest.mark.parametrize(("part", "first"), [("state", "layers.1"), ("gradient", r"the gradient of layers\.1\..*")])
def test_a_mistake_of_one_rank_is_named_on_all(part: str, first: str, pools: RankPools) -> None:
    one, other = pools[2].run(verify_broken, part)
    assert one == other and not one.is_equal
    assert_matches(one.verdict, f"the parallelized module differs from your own on one device, first in {first}$")


class Centered(nn.Module):
    """Takes the mean over one dimension away."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(self.dim, keepdim=True)


class Shifted(LastStep):
    """Its shift changes nothing, but has a gradient by rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.center = nn.Parameter(torch.ones(6)), Centered(1)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        return super().forward(self.center(x + self.shift))


def verify_shifted(world: World) -> Comparison:
    module = make(Shifted)
    return stretto.verify(module, module.inputs(own_rows(world)), loss_of)


def test_a_gradient_that_is_zero_but_for_rounding_is_equal(pools: RankPools) -> None:
    module = make(Shifted).double()
    loss_of(module, module.inputs(slice(0, 5))).backward()  # type: ignore[no-untyped-call]
    assert 0 < module.shift.grad.abs().max() < 1e-12
    assert all(result.is_equal for result in pools[2].run(verify_shifted))


class Busy(nn.Module):
    """All that a module may hold: buffers, dropout, a part in eval mode, zeros of its own, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.lstm = nn.LSTM(6, 8, 4, batch_first=True, dropout=0.3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        zeros = torch.zeros(4, len(x), 8)
        output: Tensor = self.lstm(self.norm(x.transpose(1, 2)).transpose(1, 2), (zeros, zeros))[0]
        output = self.drop(output)
        return output[:, -1] * random.random()


def verify_busy(world: World) -> tuple[Comparison, Comparison]:
    """Verify a wrapped float32 module between two steps of training, and in eval mode; all stays as it was."""
    module = make(Busy)
    wrapped, x = DistributedDataParallel(module), torch.randn(4, 12, 6)
    random.seed(world.rank)
    wrapped(x).sum().backward()

    def states() -> list[Any]:
        tensors = [*module.state_dict().values(), *(each.grad.clone() for each in module.parameters())]
        modes = [(child.training, len(child._forward_hooks), type(child).__name__) for child in module.modules()]
        return [*tensors, x, torch.get_rng_state(), str((modes, random.getstate(), torch.get_default_dtype()))]

    before = copy.deepcopy(states())
    result = stretto.verify(wrapped, x, lambda model, x: model(x).square().mean())
    for one, other in zip(states(), before, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    wrapped(x).sum().backward()
    return result, stretto.verify(module.eval(), x, lambda model, x: model(x).square().mean())


def test_the_module_stays_as_it_was_and_eval_is_compared_too(pools: RankPools) -> None:
    for result, in_eval in pools[2].run(verify_busy):
        assert result.is_equal and result.mixing == "norm"
        assert "; but norm mixes rows" in str(result) and "nn.SyncBatchNorm" in result.verdict
        assert in_eval.is_equal and in_eval.is_shared and not in_eval.mixing


@pytest.mark.parametrize(
    ("norm", "mixing"),
    [
        (nn.BatchNorm1d(6), "0"),
        (nn.BatchNorm1d(6, track_running_stats=False).eval(), "0"),
        (nn.BatchNorm1d(6).eval(), ""),
        (nn.LayerNorm(6), ""),
    ],
)
def test_the_submodule_that_mixes_rows_is_named(norm: nn.Module, mixing: str) -> None:
    module = stretto.parallelize(nn.Sequential(norm, nn.LSTM(6, 8, 2)), Layout(2, 3))
    result = stretto.verify(module, values(slice(0, 6), 6), lambda model, x: model(x)[0].square().sum())
    assert result.mixing == mixing


def test_where_no_work_is_shared_the_verdict_says_so() -> None:
    module = make(Attention)
    result = stretto.verify(module, module.inputs(slice(0, 3)), loss_of)
    assert_matches(result.verdict, r"nothing to compare: lstm \(there is no process group; start the script with torch")


def refuse(world: World, case: str) -> str:
    module = make(Attention)
    try:
        if case == "rank 1":
            stretto.verify(module, values(slice(0, 4), 12, 6 - world.rank), lambda model, x: model(x).sum())
        elif case == "not finite":
            stretto.verify(module, values(slice(0, 4), 12, 6), lambda model, x: model(x).sum() / (1 - world.rank))
        elif case == "targets":
            targets = torch.rand(4, 5)
            loss = nn.functional.binary_cross_entropy_with_logits
            stretto.verify(module, values(slice(0, 4), 12, 6), lambda model, x: loss(model(x), targets))
    except (ConfigError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("rank 1", "stretto.verify failed on rank 1, on one device: RuntimeError: input.size", "input.size"),
        ("not finite", "stretto.verify failed on rank 1, on one device: ConfigError: the loss is inf", "the loss is"),
        ("targets", "the loss is .* in torch.float32; it has to be", "the loss is .* in torch.float32"),
    ],
)
def test_a_module_that_fails_on_one_device_fails_on_all_ranks(
    case: str, first: str, second: str, pools: RankPools
) -> None:
    texts = pools[2].run(refuse, case)
    for text, pattern in zip(texts, (first, second), strict=True):
        assert_matches(text, pattern)


def test_a_module_without_regions_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"call stretto.parallelize\(module\) before stretto.verify"):
        stretto.verify(Attention(), values(slice(0, 3), 12, 6), lambda model, x: model(x).sum())


def assert_matches(text: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)
