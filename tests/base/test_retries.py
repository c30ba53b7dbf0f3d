"""Retries of requests to object storage, with a clock that only their pauses move."""

from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import pytest

from stretto.base import remote
from stretto.base.remote import RetryBudget
from stretto.errors import DataError


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    recorded: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(recorded), sleep=recorded.append)
    monkeypatch.setattr(remote, "time", clock)
    yield recorded


def test_ranks_that_fail_at_the_same_moment_retry_at_different_ones(pauses: list[float]) -> None:
    budgets = [RetryBudget("s3://bucket", 10_000.0) for _ in range(100)]
    for delay in (0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0):
        pauses.clear()
        for budget in budgets:
            budget.wait(ConnectionError("reset"))
        assert all(0.5 * delay <= pause <= 1.5 * delay for pause in pauses)
        # Spread over the whole range, not only a little.
        assert min(pauses) < 0.75 * delay and max(pauses) > 1.25 * delay and len(set(pauses)) > 90


def test_random_pauses_end_exactly_at_the_limit(pauses: list[float]) -> None:
    for _ in range(20):
        pauses.clear()
        budget = RetryBudget("s3://bucket", 20.0)
        with pytest.raises(DataError, match=r"can't be accessed after \d+ s of retries"):
            for _ in count():
                budget.wait(ConnectionError("reset"))
        assert sum(pauses) == pytest.approx(20.0)
