"""RankChange: which ranks a round has lost and gained, and how a run tells of it."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from stretto.mesh.round import Arrival, Round
from stretto.train.log import open_log
from stretto.train.rank_change import RankChange
from stretto.train.sinks.sink import iter_scalars

# The process in each of up to five slots, 0 to 3; some slots are empty.
PROCESSES = st.dictionaries(st.integers(0, 4), st.integers(0, 3), min_size=1)


def make_round(number: int, processes: dict[int, int]) -> Round:
    arrivals = (Arrival(slot, f"{slot}-{process}", "node") for slot, process in sorted(processes.items()))
    return Round(number, tuple(arrivals))


@given(PROCESSES, PROCESSES)
def test_a_process_that_is_in_one_of_two_rounds_was_lost_or_has_joined(
    before: dict[int, int], after: dict[int, int]
) -> None:
    change = RankChange.between(make_round(3, before), make_round(5, after), "a reason")
    assert change.lost == tuple(slot for slot in sorted(before) if after.get(slot) != before[slot])
    assert change.joined == tuple(slot for slot in sorted(after) if before.get(slot) != after[slot])
    assert change.reason == "a reason"


def test_the_text_names_the_ranks() -> None:
    assert str(RankChange((1,), ())) == "lost rank 1"
    assert str(RankChange((), (0, 2))) == "ranks 0 and 2 joined"
    assert str(RankChange((1, 4, 5), (1,))) == "lost ranks 1, 4 and 5, rank 1 joined"


def test_a_change_of_ranks_stays_in_the_log_if_its_step_is_repeated(tmp_path: Path) -> None:
    """All ranks may go back to an older step, but the rank was lost nevertheless."""
    log = tmp_path / "log.jsonl"
    lines = [("start", 0), ("step", 1), ("step", 2), ("rank_change", 2), ("step", 3)]
    log.write_text("".join(json.dumps({"kind": kind, "step": step}) + "\n" for kind, step in lines))
    open_log(log, 1).close()
    kept = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in kept] == [("start", 0), ("step", 1), ("rank_change", 2)]


def test_trackers_do_not_take_the_lost_ranks_for_figures() -> None:
    scalars = iter_scalars("rank_change", {"step": 7, "lost": [1], "joined": [], "ranks": 2})
    assert {scalar.name: scalar.value for scalar in scalars} == {"step": 7.0, "ranks": 2.0}
