"""CTC decoding against enumeration of all paths, and in chunks against the whole."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.errors import ConfigError
from stretto.serve import CtcBeamDecoder, CtcGreedyDecoder, ctc_beam_search, ctc_greedy

sizes = st.tuples(st.integers(1, 5), st.integers(2, 4), st.integers(0, 2**31))


def random_log_probs(num_steps: int, num_labels: int, seed: int, scale: float = 2.0) -> Tensor:
    logits = torch.randn(num_steps, num_labels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (scale * logits).log_softmax(dim=-1)


def labels_of(path: tuple[int, ...], blank: int) -> tuple[int, ...]:
    return tuple(label for label, _ in itertools.groupby(path) if label != blank)


def all_labellings(log_probs: Tensor, blank: int) -> dict[tuple[int, ...], float]:
    """The probability of each labelling, by enumeration of all paths."""
    probabilities: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        probability = math.exp(sum(float(log_probs[step, label]) for step, label in enumerate(path)))
        labels = labels_of(path, blank)
        probabilities[labels] = probabilities.get(labels, 0.0) + probability
    return probabilities


@settings(max_examples=40, deadline=None)
@given(sizes, st.data())
def test_a_wide_beam_gives_every_labelling_its_probability(size: tuple[int, int, int], data: st.DataObject) -> None:
    log_probs = random_log_probs(*size)
    blank = data.draw(st.integers(0, size[1] - 1))
    expected = all_labellings(log_probs, blank)
    hypotheses = ctc_beam_search(log_probs, beam=10_000, blank=blank)
    assert {hypothesis.labels for hypothesis in hypotheses} == set(expected)
    for hypothesis in hypotheses:
        assert math.isclose(math.exp(hypothesis.log_probability), expected[hypothesis.labels], rel_tol=1e-9)
    assert hypotheses[0].labels == max(expected, key=lambda labels: expected[labels])
    assert math.isclose(sum(math.exp(hypothesis.log_probability) for hypothesis in hypotheses), 1.0, rel_tol=1e-9)


def test_the_probability_of_labels_is_that_of_the_ctc_loss() -> None:
    log_probs = random_log_probs(6, 5, seed=3)
    best = ctc_beam_search(log_probs, beam=100_000)[0]
    target = torch.tensor([best.labels])
    loss = torch.nn.functional.ctc_loss(
        log_probs.unsqueeze(1), target, torch.tensor([6]), torch.tensor([target.shape[1]]), reduction="sum"
    )
    assert math.isclose(-float(loss), best.log_probability, rel_tol=1e-9)


@settings(max_examples=40, deadline=None)
@given(sizes, st.data())
def test_greedy_takes_the_labels_of_the_best_path(size: tuple[int, int, int], data: st.DataObject) -> None:
    log_probs = random_log_probs(*size)
    blank = data.draw(st.integers(0, size[1] - 1))
    assert tuple(ctc_greedy(log_probs, blank)) == labels_of(tuple(log_probs.argmax(dim=1).tolist()), blank)


def test_a_beam_can_beat_the_best_path() -> None:
    # Blank has 0.6 at both time steps, but `a` has three paths: 0.4 * 0.4 + 2 * 0.6 * 0.4 = 0.64 > 0.36.
    log_probs = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()
    assert ctc_greedy(log_probs) == []
    assert ctc_beam_search(log_probs, beam=4)[0].labels == (1,)


@pytest.mark.parametrize("beam", [None, 1, 3, 12])
@pytest.mark.parametrize("seed", range(3))
def test_chunks_emit_what_the_whole_gives(beam: int | None, seed: int) -> None:
    log_probs = random_log_probs(60, 4, seed, scale=4.0)
    whole = ctc_greedy(log_probs) if beam is None else [*ctc_beam_search(log_probs, beam)[0].labels]
    decoder = CtcGreedyDecoder() if beam is None else CtcBeamDecoder(beam)
    for _ in range(2):  # the second time, the decoder has been used
        emitted: list[int] = []
        for chunk in torch.split(log_probs, [1, 7, 0, 20, 32]):
            emitted += decoder.add(chunk)
            assert whole[: len(emitted)] == emitted
        assert len(emitted) > 0
        assert emitted + decoder.finish() == whole
        if beam is None:
            break


def test_a_stream_that_goes_on_is_decoded_in_bounded_memory() -> None:
    decoder = CtcBeamDecoder(beam=8)
    log_probs = random_log_probs(50, 4, seed=1, scale=6.0)
    for _ in range(20):
        decoder.add(log_probs)
    assert max(len(hypothesis.labels) for hypothesis in decoder.hypotheses) < 50


def test_labels_of_probability_zero_are_never_returned() -> None:
    log_probs = torch.full((3, 3), -math.inf)
    log_probs[:, 1] = 0.0
    hypotheses = ctc_beam_search(log_probs, beam=5)
    assert [hypothesis.labels for hypothesis in hypotheses] == [(1,)]
    assert math.isclose(hypotheses[0].log_probability, 0.0, abs_tol=1e-12)


def test_logits_and_arrays_give_what_log_probabilities_give() -> None:
    log_probs = random_log_probs(8, 4, seed=2)
    logits = log_probs + torch.randn(8, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 100
    array = logits.numpy().copy()
    array.flags.writeable = False
    expected = ctc_beam_search(log_probs, beam=6)
    for scores in (logits, array):
        assert ctc_greedy(scores) == ctc_greedy(log_probs)
        hypotheses = ctc_beam_search(scores, beam=6)
        assert [hypothesis.labels for hypothesis in hypotheses] == [hypothesis.labels for hypothesis in expected]
        for hypothesis, other in zip(hypotheses, expected, strict=True):
            assert math.isclose(hypothesis.log_probability, other.log_probability, rel_tol=1e-9)


def test_a_time_step_without_any_probability_makes_all_labels_impossible() -> None:
    (hypothesis,) = ctc_beam_search(torch.full((2, 3), -math.inf), beam=4)
    assert hypothesis.log_probability == -math.inf


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="beam=0 is less than 1"):
        ctc_beam_search(torch.zeros(2, 3), beam=0)
    with pytest.raises(ConfigError, match=r"blank=3 is not one of the 3 outputs; use 0 to 2"):
        ctc_greedy(torch.zeros(2, 3), blank=3)
    with pytest.raises(ConfigError, match=r"log_probs has the shape \[2, 1, 3\], not \[time, labels\]"):
        ctc_greedy(torch.zeros(2, 1, 3))
