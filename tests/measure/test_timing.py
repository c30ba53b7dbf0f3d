import random

import pytest

from stretto.measure.timing import median_bounds, median_ratio


def test_ratios_are_taken_within_rounds() -> None:
    # The machine gets slower: the medians are 4 and 3, but in most rounds the first takes twice as long.
    assert median_ratio([2, 4, 6], [1, 3, 3]) == 2


def test_rounds_without_a_partner_are_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        median_ratio([1.0, 2.0], [1.0])


def test_the_bounds_of_a_median_contain_it_in_nineteen_of_twenty_cases_each() -> None:
    """Of 20 values, 5 or fewer are below the median in 2 % of cases, and 6 or fewer in 6 %."""
    assert median_bounds(range(20)) == (5, 14)
    assert median_bounds([3.0, 1.0, 2.0]) == (1.0, 3.0), "too few for that confidence"
    assert median_bounds([1.0]) == (1.0, 1.0)
    random_numbers = random.Random(1)
    cases = [median_bounds([random_numbers.gauss(7, 2) for _ in range(14)]) for _ in range(2000)]
    assert sum(low <= 7 for low, _ in cases) >= 0.94 * len(cases)
    assert sum(high >= 7 for _, high in cases) >= 0.94 * len(cases)
