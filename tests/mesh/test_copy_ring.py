"""CopyRing: who keeps the copy of which rank, and that it arrives there."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.rank_pool import RankPools
from stretto import World
from stretto.mesh.copy_ring import CopyRing, keepers


@given(st.lists(st.sampled_from("abcde"), min_size=2, max_size=20))
def test_copies_are_on_other_nodes_wherever_that_is_possible(nodes: list[str]) -> None:
    by_rank = keepers(nodes)
    assert sorted(by_rank) == list(range(len(nodes))), "each rank keeps one copy"
    assert all(keeper != rank for rank, keeper in enumerate(by_rank))
    num_elsewhere = sum(nodes[rank] != nodes[keeper] for rank, keeper in enumerate(by_rank))
    # The copies of the largest node are kept by all others, and the copies of those by it, or by each other.
    num_others = len(nodes) - max(Counter(nodes).values())
    assert num_elsewhere == min(len(nodes), 2 * num_others)


def exchange(world: World, nodes: list[str]) -> list[int]:
    """Send the own number; return the one that came, and the ranks on both sides."""
    ring = CopyRing(world, nodes)
    (received,) = ring.exchange(torch.tensor([world.rank], dtype=torch.uint8)).tolist()
    return [received, ring.kept, ring.keeper]


@pytest.mark.parametrize("nodes", [["a", "b", "b"], ["a", "b", "a"], ["a", "a", "a"]], ids="".join)
def test_bytes_of_each_rank_arrive_at_its_keeper(nodes: list[str], pools: RankPools) -> None:
    """On nodes of different sizes, and on those whose ranks don't have consecutive numbers."""
    by_rank = keepers(nodes)
    for rank, (received, kept, keeper) in enumerate(pools[3].run(exchange, nodes)):
        assert (received, by_rank[kept], keeper) == (kept, rank, by_rank[rank])
