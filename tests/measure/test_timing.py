import pytest

from stretto.measure.timing import median_ratio


def test_ratios_are_taken_within_rounds() -> None:
    # The machine gets slower: the medians are 4 and 3, but in most rounds the first takes twice as long.
    assert median_ratio([2, 4, 6], [1, 3, 3]) == 2


def test_rounds_without_a_partner_are_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        median_ratio([1.0, 2.0], [1.0])
