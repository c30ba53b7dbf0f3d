import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.profiles import kind, profile, profiles
from stretto.plan.cost_model import CostModel, interpolate
from stretto.plan.profile import AllReduceCost, CostPoint, KindCosts, Link, Profile, RankSpeed


@given(profiles())
def test_measured_points_are_exact_and_ranges_of_blocks_are_sums(drawn: Profile) -> None:
    costs = CostModel(drawn)
    for block_kind in drawn.kinds.values():
        for point in block_kind.points:
            chunk = interpolate(block_kind, point.rows, point.steps)
            assert (chunk.forward, chunk.backward) == pytest.approx((point.forward, point.backward), abs=1e-12)
    whole = costs.chunk_cost(0, costs.num_blocks, 4, 8)
    each = [costs.chunk_cost(index, index + 1, 4, 8) for index in range(costs.num_blocks)]
    savings = costs.fusion_savings(4, 8)
    for name in ("forward", "backward", "saved"):
        total = sum(getattr(chunk, name) for chunk in each) - sum(getattr(saving, name) for saving in savings)
        assert getattr(whole, name) == pytest.approx(total)


def test_fused_blocks_cost_less_only_if_they_are_in_the_same_range() -> None:
    # The first is an embedding; of four recurrent blocks, each but the first adds a quarter of its cost.
    costs = CostModel(profile([kind(), *[kind(fused=0.25)] * 4, kind()], fused_blocks=(2, 3, 4)))
    for (start, stop), blocks in {(0, 6): 3.75, (1, 5): 1.75, (2, 5): 1.5, (4, 6): 2, (0, 1): 1, (2, 4): 1.25}.items():
        chunk = costs.chunk_cost(start, stop, 8, 16)
        assert (chunk.forward, chunk.backward) == pytest.approx((blocks * 1e-3, blocks * 2e-3))


@given(st.integers(1, 64), st.integers(1, 64))
def test_a_linear_cost_is_exact_between_and_beyond_the_points(rows: int, steps: int) -> None:
    cost = interpolate(kind(1e-3, 3e-3, start=1e-4), rows, steps)
    assert cost.forward == pytest.approx(1e-4 + 1e-3 * rows * steps / 128)
    assert cost.backward == pytest.approx(1e-4 + 3e-3 * rows * steps / 128)


def test_a_single_point_is_scaled_in_proportion() -> None:
    single = KindCosts(points=(CostPoint(rows=8, steps=16, forward=1.0, backward=2.0, saved=64),))
    half = interpolate(single, 4, 16)
    assert (half.forward, half.backward, half.saved) == pytest.approx((0.5, 1.0, 32))
    assert interpolate(single, 8, 32).forward == pytest.approx(2.0)


def test_ranks_that_share_cores_are_slower_the_more_of_them_compute() -> None:
    speeds = tuple(
        RankSpeed(ranks=ranks, contended=contended, solo=1.0) for ranks, contended in ((1, 1.0), (2, 0.9), (4, 0.4))
    )
    contention = CostModel(profile([kind()], speeds=speeds)).contention
    assert contention.relative_speed(2, num_busy=1) == 1.0 and contention.relative_speed(
        2, num_busy=2
    ) == pytest.approx(0.9)
    # All four are as fast together as 1.6 ranks; three of them share that.
    assert contention.relative_speed(4, num_busy=4) == pytest.approx(0.4) and contention.relative_speed(
        4, num_busy=3
    ) == pytest.approx(1.6 / 3)
    assert contention.relative_speed(8, num_busy=8) == pytest.approx(0.2), (
        "more ranks than were measured share the same cores"
    )
    assert CostModel(profile([kind()])).contention.relative_speed(8, num_busy=8) == 1.0


def test_an_all_reduce_costs_what_was_measured_or_else_what_links_allow() -> None:
    link, network = Link(latency=1e-6, bandwidth=1e10), Link(latency=1e-5, bandwidth=1e9)
    costs = CostModel(
        profile(
            [kind()],
            intra_node=link,
            inter_node=network,
            all_reduces=(AllReduceCost(ranks=2, latency=1e-3, bandwidth=1e6),),
        )
    )
    assert costs.all_reduce_seconds(1e6, 1, 1) == 0
    assert costs.all_reduce_seconds(1e6, 2, 1) == pytest.approx(1.001)
    # A ring of four, at the pace of the two that were measured: 1.5 passes instead of 1.
    assert costs.all_reduce_seconds(1e6, 4, 1) == pytest.approx(1.5 + 4e-6)
    # Sixteen nodes with one rank each: about two passes, and four messages up and down a tree.
    assert costs.all_reduce_seconds(1e6, 16, 16) == pytest.approx(2 * 15 / 16 * 1e6 / 1e9 + 8e-5)
