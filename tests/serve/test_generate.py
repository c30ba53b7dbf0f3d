"""Text is sampled by seed, the same alone and among others, and greedily at temperature 0."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.untrained_model import untrained
from stretto import TrainedModel
from stretto.data import Corpus
from stretto.errors import ConfigError
from stretto.nn import Rows
from stretto.serve import Sampling, generate, generate_tokens


def text(trained: TrainedModel, prompt: str = "", length: int = 40, count: int = 1, **sampling: float) -> list[str]:
    pieces = list(generate(trained, prompt, length, Sampling(**sampling), count=count))  # type: ignore[arg-type]
    assert len(pieces) == length
    return ["".join(parts) for parts in zip(*pieces, strict=True)]


def test_the_same_seed_gives_the_same_text_alone_and_among_others(byte_corpus: Corpus) -> None:
    trained = untrained(byte_corpus.location, lanes=2, window=10)
    three = text(trained, "the", count=3, seed=4)
    assert three[:1] == text(trained, "the", seed=4) and len(set(three)) == 3
    assert text(trained, "the", seed=5) != three[:1]


def test_greedy_text_takes_the_most_likely_token_after_all_before_it(word_corpus: Corpus) -> None:
    stack = untrained(word_corpus.location, lanes=2, window=10).stack.double()
    prompt = np.array([1, 2, 3])
    stream = generate_tokens(stack, prompt, Sampling(temperature=0))
    tokens = [next(stream)[0] for _ in range(12)]
    for number, token in enumerate(tokens):
        before = torch.tensor([*prompt, *tokens[:number]]).unsqueeze(1)
        with torch.no_grad():
            y, _ = stack(before, stack.initial_state(Rows.of(1, dtype=torch.float64)))
        assert token == int(y[-1, 0].argmax())


def test_words_are_joined_as_they_were_split_and_none_is_unknown(word_corpus: Corpus) -> None:
    trained = untrained(word_corpus.location, lanes=2, window=10)
    (generated,) = text(trained, "the theme", length=300, temperature=3.0)
    assert "<unk>" not in generated and "<eos>" not in generated
    vocabulary = word_corpus.vocabulary
    tokens = vocabulary.encode("the theme" + generated)
    assert 0 not in tokens and len(tokens) == 302


def test_bytes_become_characters_when_they_are_complete(byte_corpus: Corpus) -> None:
    trained = untrained(byte_corpus.location, lanes=2, window=10)
    stream = generate_tokens(trained.stack, np.frombuffer(b"x", np.uint8), Sampling(seed=1))
    tokens = [next(stream)[0] for _ in range(400)]
    assert text(trained, "x", length=400, seed=1) == [bytes(tokens).decode("utf-8", errors="replace")]


@given(
    st.lists(st.floats(-5, 5), min_size=1, max_size=20),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 5),
    st.floats(0.05, 1),
)
def test_top_k_and_top_p_limit_the_tokens_that_are_sampled(
    logits: list[float], uniform: float, top_k: int, top_p: float
) -> None:
    values = np.array(logits)
    probabilities = np.exp(values) / np.exp(values).sum()
    assert (values > values[Sampling(top_k=top_k).draw(values, uniform)]).sum() < top_k
    drawn = Sampling(top_p=top_p).draw(values, uniform)
    # The tokens that are more likely do not reach top_p by themselves.
    assert probabilities[values > values[drawn]].sum() <= top_p + 1e-9
    assert Sampling(temperature=0).draw(values, uniform) == int(values.argmax())


def test_draws_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.1, 0.6, 0.3]))
    drawn = [Sampling().draw(logits, place / 1000) for place in range(1000)]
    assert np.bincount(drawn) / 1000 == pytest.approx([0.1, 0.6, 0.3], abs=0.002)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"temperature": -1.0}, "temperature=-1.0"), ({"top_k": 0}, "top_k=0"), ({"top_p": 1.5}, "top_p=1.5")],
)
def test_invalid_sampling_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)  # type: ignore[arg-type]


def test_a_text_without_tokens_is_refused(byte_corpus: Corpus) -> None:
    trained = untrained(byte_corpus.location, lanes=2, window=10)
    with pytest.raises(ConfigError, match="length=0"):
        next(generate(trained, "a", 0))
    with pytest.raises(ConfigError, match="count=0"):
        next(generate(trained, "a", count=0))
