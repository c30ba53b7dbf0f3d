"""The module law: a parallelized module under DDP computes what the user's own module computes on one device."""

from typing import Any

import pytest
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from helpers.one_queue import run_in_one_queue
from helpers.patterns import PATTERNS, ROWS, Unbatched, loss_of, make, own_rows, tensors
from helpers.rank_pool import RankPool, RankPools
from stretto import World
from stretto.mesh.join import BACKEND_VARIABLE
from stretto.mesh.strict import STRICT
from stretto.parallel.layout import Layout
from stretto.parallel.messages import Messages
from stretto.parallel.module import parallelize


def difference(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape, (one.shape, other.shape)
    return float((one - other).detach().abs().max()) if one.numel() else 0.0


def compare(world: World, layout: Layout, patterns: list[Any], rows: tuple[int, ...]) -> dict[str, float]:
    """Return the largest difference of each pattern's outputs and gradients, on this rank."""
    own = own_rows(world.rank, rows)
    found: dict[str, float] = {}
    for pattern in patterns:
        whole = make(pattern)
        expected = tensors(whole(*whole.inputs(slice(0, sum(rows)))))
        loss_of(expected).backward()  # type: ignore[no-untyped-call]
        shared = parallelize(make(pattern), layout)
        wrapped = DistributedDataParallel(shared, bucket_cap_mb=0.004)  # many buckets, from the second step on
        for _ in range(2):
            shared.zero_grad()
            outputs = tensors(wrapped(*shared.inputs(own)))
            loss_of(outputs).backward()  # type: ignore[no-untyped-call]
        differences = [difference(one, other[own]) for one, other in zip(outputs, expected, strict=True)]
        for one, other in zip(shared.parameters(), whole.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None and other.grad is not None:
                differences.append(difference(one.grad * world.size, other.grad))
        found[type(whole).__name__] = max(differences)
    return found


def count_messages(world: World, layout: Layout, patterns: list[Any]) -> dict[str, int]:
    """Return how many messages the regions of each pattern send."""
    counts: dict[str, int] = {}
    count = 0
    send = Messages.all_to_all

    def counting(self: Messages, *arguments: Any) -> list[Tensor]:  # noqa: ANN401
        nonlocal count
        count += 1
        return send(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Messages, "all_to_all", counting)
        for pattern in patterns:
            module = parallelize(make(pattern), layout)
            count = 0
            loss_of(tensors(module(*module.inputs(slice(0, 9))))).backward()  # type: ignore[no-untyped-call]
            counts[type(module).__name__] = count
    return counts


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, Layout(2, 5, recompute=True, spans=2)),
        (3, Layout(3, 3, spans=3)),
        (4, Layout(4, 3, spans=4)),
        (4, Layout(2, 3, spans=2)),  # two replicas
    ],
    ids=str,
)
def test_patterns_compute_the_same_and_no_operation_waits_for_a_later_one(
    size: int, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, STRICT)
    pool = RankPool(size)
    for found in run_in_one_queue(pool, compare, layout, PATTERNS, ROWS[size]):
        assert {name: value for name, value in found.items() if not value < 1e-9} == {}
    pool.close()


def test_rows_without_a_dimension_of_rows_are_shared(pools: RankPools) -> None:
    for found in pools[3].run(compare, Layout(3, 4), [Unbatched], (1, 1, 1)):
        assert found["Unbatched"] < 1e-9
    assert pools[2].run(count_messages, Layout(2, 3), [Unbatched])[0]["Unbatched"] >= 4


def test_every_pattern_is_really_shared(pools: RankPools) -> None:
    (counts, _) = pools[2].run(count_messages, Layout(2, 3), PATTERNS)
    assert {name for name, count in counts.items() if count < 4} == set()
