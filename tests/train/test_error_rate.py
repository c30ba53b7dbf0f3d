"""Error rates against a recursive definition, and sums that don't depend on how rows are split."""

import math
from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from stretto.train import ErrorRate, edit_distance

labels = st.lists(st.integers(0, 2), max_size=6)


@given(labels, labels)
def test_the_distance_is_that_of_the_definition(first: list[int], second: list[int]) -> None:
    @cache
    def distance(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        substitute = distance(i - 1, j - 1) + (first[i - 1] != second[j - 1])
        return min(substitute, distance(i - 1, j) + 1, distance(i, j - 1) + 1)

    assert edit_distance(first, second) == distance(len(first), len(second))


def test_rates_count_words_and_characters_over_all_rows() -> None:
    assert edit_distance("kitten", "sitting") == 3
    words = ErrorRate.of_words("three one  four", "three four") + ErrorRate.of_words("", "one five nine")
    assert words == ErrorRate(4, 5) and words.rate == 0.8
    characters = ErrorRate.of("ther", "there") + ErrorRate.of("äb", "ab")
    assert characters == ErrorRate(2, 7)
    assert math.isnan(ErrorRate().rate) and math.isnan(ErrorRate.of("abc", "").rate)
    assert sum((words, characters), ErrorRate()) == ErrorRate(6, 12)
