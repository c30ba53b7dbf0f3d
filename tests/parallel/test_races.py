"""No kernel of a step with regions touches a message's memory while the message is under way."""

from collections.abc import Sequence

import pytest
from torch import Tensor

from helpers.device_log import LoggedWork
from helpers.logged_regions import Change, log_steps
from helpers.races import find_races
from helpers.rank_pool import NEEDS_GLOO, RankPools
from stretto import World
from stretto.parallel import Layout
from stretto.parallel.messages import Messages

pytestmark = NEEDS_GLOO


def record(
    world: World, layout: Layout, changes: Sequence[Change] = (), is_packed: bool = False
) -> tuple[list[str], int, int]:
    """Return the races in three steps of this rank, and the numbers of its kernels and of its streams."""
    log, _ = log_steps(world, layout, changes, is_packed=is_packed)
    return find_races(log.accesses), len(log.accesses), len({access.event.stream for access in log.accesses})


@pytest.mark.parametrize(
    ("size", "layout", "is_packed"),
    [(2, Layout(2, 3, spans=2), False), (3, Layout(3, 2, recompute=True, spans=3), True)],
    ids=str,
)
def test_steps_have_no_races(size: int, layout: Layout, is_packed: bool, pools: RankPools) -> None:
    for races, num_kernels, num_streams in pools[size].run(record, layout, (), is_packed):
        assert races == []
        assert num_kernels > 1000
        assert num_streams == 3  # of kernels, of the regions, and of DDP


def read_early(patch: pytest.MonkeyPatch) -> None:
    """Return what is received without waiting for it."""
    patch.setattr(LoggedWork, "wait", lambda self, *timeout: True)


def write_early(patch: pytest.MonkeyPatch) -> None:
    """Overwrite what is sent without waiting until it has gone."""
    exchange = Messages.exchange

    def exchange_and_overwrite(self: Messages, sends: Sequence[tuple[int, Tensor]], *rest: object) -> list[Tensor]:
        received = exchange(self, sends, *rest)  # type: ignore[arg-type]
        for _, tensor in sends:
            tensor.data.mul_(2)  # autograd does not notice
        return received

    patch.setattr(Messages, "exchange", exchange_and_overwrite)


@pytest.mark.parametrize(
    ("change", "rank", "race"), [(read_early, 1, "after batch"), (write_early, 0, "mul_ after batch")]
)
def test_a_race_is_found_when_it_is_put_in(change: Change, rank: int, race: str, pools: RankPools) -> None:
    races, _, _ = pools[2].run(record, Layout(2, 3, spans=2), (change,))[rank]
    assert any(race in each for each in races)
