"""Subwords: any text comes back, lines are encoded by themselves, and the JSON in a store is all that is needed."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import DataError
from stretto.prepare.tokenizer import train_bpe
from stretto.store.subwords import SubwordVocabulary, split_lines
from stretto.store.vocabulary import parse_vocabulary, vocabulary_bytes

tokenizers = pytest.importorskip("tokenizers")

SUBWORDS = train_bpe(["the stretto enters before the theme has ended\n", "  the äther's themes\n\n"] * 20, 320)


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_comes_back(text: str) -> None:
    tokens = SUBWORDS.encode(text)
    assert SUBWORDS.decode(tokens) == SUBWORDS.decode(tokens.tolist()) == text
    assert SUBWORDS.encode(text.encode()).tolist() == tokens.tolist()
    assert b"".join(map(SUBWORDS.token_bytes, tokens)) == text.encode()


@given(st.text("ab \n\t\r", max_size=30), st.data())
def test_a_text_may_be_cut_between_lines(text: str, data: st.DataObject) -> None:
    edges = [0, *(index + 1 for index, character in enumerate(text) if character == "\n")]
    edge = data.draw(st.sampled_from(edges))
    halves = [*SUBWORDS.encode(text[:edge]), *SUBWORDS.encode(text[edge:])]
    assert halves == SUBWORDS.encode(text).tolist()
    assert "".join(split_lines(text)) == text


@given(st.text("the äther's \n", max_size=30), st.lists(st.integers(0, len(SUBWORDS) - 1), max_size=20))
def test_tokens_are_those_of_the_package(text: str, tokens: list[int]) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(SUBWORDS.tokenizer_json)
    assert SUBWORDS.encode(text).tolist() == tokenizer.encode(text).ids
    assert SUBWORDS.decode(tokens) == tokenizer.decode(tokens, skip_special_tokens=False)


def test_training_is_deterministic_and_learns_words() -> None:
    texts = ["the theme enters\n", "before the theme\n"] * 10
    assert train_bpe(texts, 300) == train_bpe(reversed(texts), 300)
    vocabulary = train_bpe(texts, 300)
    assert 256 < len(vocabulary) <= 300
    assert len(vocabulary.encode("the theme")) == 2
    assert vocabulary.unknown_token is None and vocabulary.level == "subword"


def test_a_vocabulary_of_subwords_is_written_and_read_and_sent() -> None:
    content = vocabulary_bytes(SUBWORDS)
    again = parse_vocabulary(content, "a store")
    assert again == SUBWORDS and len(again) == len(SUBWORDS)
    assert again.encode("the theme").tolist() == SUBWORDS.encode("the theme").tolist()
    sent = pickle.dumps(SUBWORDS)
    assert pickle.loads(sent) == SUBWORDS  # noqa: S301 - our own
    assert len(sent) < 3 * len(content)


def test_a_tokenizer_of_another_kind_is_read_with_its_unknown_token() -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 1, "the": 0, "theme": 4}, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    vocabulary = SubwordVocabulary.parse(tokenizer.to_str().encode(), "tokenizer.json")
    assert vocabulary.encode("the theme\nof the theme").tolist() == [0, 4, 1, 0, 4]
    assert vocabulary.decode([0, 4]) == "the theme"
    assert vocabulary.unknown_token == 1 and len(vocabulary) == 5 and not vocabulary.is_byte_level


def test_dropout_of_merges_is_switched_off() -> None:
    tree = json.loads(SUBWORDS.tokenizer_json)
    tree["model"]["dropout"] = 0.9
    vocabulary = SubwordVocabulary.parse(json.dumps(tree).encode(), "tokenizer.json")
    assert vocabulary.encode("the stretto enters").tolist() == SUBWORDS.encode("the stretto enters").tolist()


DAMAGED = {
    "no json": "x",
    "a list": "[]",
    "no model": "{}",
    "no vocabulary": '{"model": {}}',
    "empty": '{"model": {"vocab": {}}}',
    "negative": '{"model": {"vocab": {"a": -1}}}',
    "bad model": '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["b", "c"]]}}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_tokenizer_is_refused_with_its_name(content: str) -> None:
    with pytest.raises(DataError, match=r"^my.json: .*; use a file that Tokenizer.save wrote$"):
        SubwordVocabulary.parse(content.encode(), "my.json")


def test_a_token_beyond_a_million_is_refused() -> None:
    with pytest.raises(DataError, match=r"^my.json: .*it has token 1,000,000, but tokens must be below 1,000,000"):
        SubwordVocabulary.from_tree({"model": {"vocab": {"a": 0, "b": 1_000_000}}}, "my.json")


def test_a_file_whose_numbers_the_package_changes_is_refused() -> None:
    tree = json.loads(SUBWORDS.tokenizer_json)
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tree["added_tokens"] = [{"id": len(SUBWORDS), "content": "<s>", **token}]
    assert len(SubwordVocabulary.parse(json.dumps(tree).encode(), "my.json")) == len(SUBWORDS) + 1
    tree["added_tokens"][0]["id"] = 900_000
    with pytest.raises(DataError, match=r"^my.json: tokenizers reads it with other tokens than those it lists; use"):
        SubwordVocabulary.parse(json.dumps(tree).encode(), "my.json")


def test_a_damaged_tokenizer_in_a_store_is_refused_with_its_location() -> None:
    for content in ('{"level": "subword", "symbols": []}', '{"level": "subword", "symbols": [], "tokenizer": {}}'):
        with pytest.raises(DataError, match=r"^data/store: "):
            parse_vocabulary(content.encode(), "data/store")


def test_a_pattern_that_the_package_gives_up_on_is_an_error() -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    vocabulary = SubwordVocabulary.parse(tokenizer.to_str().encode(), "my.json")
    with pytest.raises(DataError, match=r"^the tokenizer of 2 subwords can't encode a text \(.*; use a different"):
        vocabulary.encode("a" * 200 + "c")
