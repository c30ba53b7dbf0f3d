"""Viterbi against enumeration of all tags, with rows of different lengths."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import ConfigError
from stretto.nn import viterbi


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 2**31))
def test_the_tags_are_the_best_of_all(lengths: list[int], num_tags: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_steps = max(lengths)
    emissions = torch.randn(num_steps, len(lengths), num_tags, generator=generator, dtype=torch.float64)
    transitions = torch.randn(num_tags, num_tags, generator=generator, dtype=torch.float64)
    start, end = torch.randn(2, num_tags, generator=generator, dtype=torch.float64)
    tags, scores = viterbi(emissions, transitions, start, end, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        assert tags[length:, row].tolist() == [-100] * (num_steps - length)
        if not length:
            assert scores[row] == 0
            continue

        def score(path: tuple[int, ...], row: int = row) -> float:
            total = start[path[0]] + end[path[-1]]
            total = total + sum(emissions[step, row, tag] for step, tag in enumerate(path))
            return float(total + sum(transitions[tag, after] for tag, after in itertools.pairwise(path)))

        best = max(itertools.product(range(num_tags), repeat=length), key=score)
        assert tuple(tags[:length, row].tolist()) == best
        torch.testing.assert_close(float(scores[row]), score(best), rtol=1e-12, atol=1e-12)


def test_without_lengths_rows_are_whole_and_shapes_are_checked() -> None:
    emissions = torch.tensor([[[0.0, 1.0]], [[3.0, 0.0]]])
    tags, scores = viterbi(emissions, torch.tensor([[0.0, 0.0], [-5.0, 0.0]]), torch.zeros(2), torch.zeros(2))
    assert tags.tolist() == [[0], [0]] and scores.tolist() == [3.0]  # from 1 to 0 costs more than it gains
    with pytest.raises(ConfigError, match=r"have the shapes \[2, 3\], \[2\], \[2\], but emissions have 2 tags"):
        viterbi(emissions, torch.zeros(2, 3), torch.zeros(2), torch.zeros(2))
    with pytest.raises(ConfigError, match=r"emissions have the shape \[2, 2\]; use \[time, batch, tags\]"):
        viterbi(emissions[:, 0], torch.zeros(2, 2), torch.zeros(2), torch.zeros(2))
