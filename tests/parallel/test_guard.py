"""The order guard: ranks that do different things end with an error that names ranks and calls, not with a hang."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from helpers.rank_pool import RankPools, RanksFailedError
from stretto import World
from stretto.errors import MeshError
from stretto.parallel import groups
from stretto.parallel.layout import Layout
from stretto.parallel.module import parallelize

SECONDS = 2.0  # the timeout of the ranks here


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(3, 4, 2), nn.LSTM(4, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(x)[0])[0]
        return output


def go(world: World, case: str) -> str:
    """Let rank 1 do something else than rank 0; return the error of this rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "_timeout", lambda: timedelta(seconds=SECONDS))
        groups._groups.clear()
        torch.manual_seed(0)
        model = DistributedDataParallel(parallelize(TwoLayers(), Layout(2, 2)))
        x = torch.randn(6, 3, 3)
        is_other = world.rank == 1
        for _ in range(2):  # steps that all take; in the second one, DistributedDataParallel makes its buckets anew
            model(x).sum().backward()
        started = time.monotonic()
        try:
            run_case(model, x, case, is_other=is_other)
        except MeshError as error:
            assert time.monotonic() - started < 4 * SECONDS
            return str(error)
        except Exception as error:  # noqa: BLE001 - the caller compares it
            return f"{type(error).__name__}: {error}"
        finally:
            groups._groups.clear()
    return ""


def run_case(model: Any, x: Tensor, case: str, *, is_other: bool) -> None:  # noqa: ANN401
    first, second = model.module.first, model.module.second
    match case:
        case "another region":
            (second(torch.randn(6, 3, 4)) if is_other else first(x))[0].sum().backward()
        case "a call more":
            if is_other:
                first(x)
            model(x).sum().backward()
        case "no call":
            if not is_other:
                first(x)
        case "a skipped backward":  # of a loss that is not a number, usually
            loss = model(x).sum()
            if not is_other:
                loss.backward()
            model(x)
        case "a loss without a region":
            output, _ = first(x)
            second(output.detach() if is_other else output)[0].sum().backward()
            model(x)
        case "an epoch that ends early":
            for _ in range(1 if is_other else 2):
                model(x).sum().backward()
        case "another width":
            first(torch.randn(6, 3, 3 + is_other))
        case "another dtype":
            (first.double() if is_other else first)(x.double() if is_other else x)


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("another region", r"rank 0 is at call 3 of first \(float32, width 3\); rank 1 is at call 3 of second", "same"),
        ("a call more", r"rank 0 is at call 3 of second .*; rank 1 is at call 4 of first", "same"),
        ("no call", r"rank 0 is at call 3 of first .*, but rank 1 did not come within 2 s", ""),
        (
            "a skipped backward",
            r"rank 0 is at the backward of call 3 of second .*; rank 1 is at call 4 of first",
            "same",
        ),
        ("a loss without a region", r"rank 0 is at the backward of call 3 of first .*; rank 1 is at call 4 of", "same"),
        ("an epoch that ends early", r"rank 0 is at call 4 of first .*, but rank 1 did not come within 2 s", ""),
        ("another width", r"rank 1 refused the input of first: its own message says why", "input.size"),
        ("another dtype", r"rank 0 is at call 3 of first \(float32.*; rank 1 is at call 3 of first \(float64", "same"),
    ],
)
def test_ranks_that_do_different_things_are_told_apart(case: str, first: str, second: str, pools: RankPools) -> None:
    told, other = pools[2].run(go, case)
    assert_matches(told, first)
    assert_matches(other, first if second == "same" else second)
    if told and second == "same":
        assert "drop_last=True" in told


def assert_matches(text: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern or "^$"):
        raise ValueError(text)


def join_epochs(world: World) -> None:
    """Rank 1 has a step less. DistributedDataParallel's Join stands in for it in the all-reduces, not in regions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "_timeout", lambda: timedelta(seconds=SECONDS))
        model = DistributedDataParallel(parallelize(TwoLayers(), Layout(2, 2)))
        with Join([model]):
            for _ in range(2 - world.rank):
                model(torch.randn(6, 3, 3)).sum().backward()


def test_join_does_not_hide_an_epoch_that_ends_early(pools: RankPools) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pools[2].run(join_epochs)
    assert_matches(failed.value.errors[0], r"rank 0 is at call 2 of first .*, but rank 1 did not come within 2 s.*")
    assert "drop_last=True" in failed.value.errors[0]
