"""The order guard: ranks that do different things end with an error that names ranks and calls, not with a hang."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.rank_pool import RankPools
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
        model = parallelize(TwoLayers(), Layout(2, 2))
        x = torch.randn(6, 3, 3)
        is_other = world.rank == 1
        model(x).sum().backward()  # a step that all take
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
    match case:
        case "another region":
            (model.second(torch.randn(6, 3, 4)) if is_other else model.first(x))[0].sum().backward()
        case "a call more":
            if is_other:
                model.first(x)
            model(x).sum().backward()
        case "no call":
            if not is_other:
                model(x)
        case "a skipped backward":
            loss = model(x).sum()
            if not is_other:
                loss.backward()
            model(x)
        case "a loss without a region":
            output, _ = model.first(x)
            (output.detach() if is_other else output).sum()
            loss = model.second(output.detach() if is_other else output)[0].sum()
            loss.backward()
            model(x)
        case "rank 0 alone":
            for _ in range(1 if is_other else 2):
                model(x).sum().backward()
        case "another width":
            model.first(torch.randn(6, 3, 3 + is_other))
        case "another dtype":
            (model.double() if is_other else model).first(x.double() if is_other else x)


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("another region", r"rank 0 is at call 2 of first \(float32, width 3\); rank 1 is at call 2 of second", "same"),
        ("a call more", r"rank 0 is at call 2 of second .*; rank 1 is at call 3 of first", "same"),
        ("no call", r"rank 0 is at call 2 of first .*, but rank 1 did not come within 2 s", ""),
        (
            "a skipped backward",
            r"rank 0 is at the backward of call 2 of second .*; rank 1 is at call 3 of first",
            "same",
        ),
        ("a loss without a region", r"rank 0 is at the backward of call 2 of first .*; rank 1 is at call 3 of", "same"),
        ("rank 0 alone", r"rank 0 is at call 3 of first .*, but rank 1 did not come within 2 s", ""),
        ("another width", r"rank 1 refused the input of first: its own message says why", "input.size"),
        ("another dtype", r"rank 0 is at call 2 of first \(float32.*; rank 1 is at call 2 of first \(float64", "same"),
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
