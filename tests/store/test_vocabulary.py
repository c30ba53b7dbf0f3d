import pytest

from stretto.errors import DataError
from stretto.store.vocabulary import (
    ByteVocabulary,
    SymbolVocabulary,
    parse_vocabulary,
    token_dtype,
    vocabulary_bytes,
)

WORDS = SymbolVocabulary("word", ("<unk>", "<eos>", "the", "fugue"))


def test_words_are_split_at_white_space_and_the_end_of_a_line_is_a_word() -> None:
    tokens = WORDS.encode(b"the  fugue\nthe\tcanon\n\nfugue")
    assert tokens.tolist() == [2, 3, 1, 2, 0, 1, 1, 3]
    assert WORDS.decode(tokens.tolist()) == "the fugue\nthe <unk>\n\nfugue"


def test_characters_and_bytes_come_back_as_they_were() -> None:
    text = "a fügue\n"
    characters = SymbolVocabulary("char", ("<unk>", *sorted(set(text))))
    assert characters.decode(characters.encode(text.encode()).tolist()) == text
    assert len(characters.encode(text.encode())) == len(text)
    assert ByteVocabulary().decode(ByteVocabulary().encode(text.encode()).tolist()) == text
    tokens = ByteVocabulary().encode(text).astype("int64")
    assert ByteVocabulary().decode(tokens) == text  # as an array, such as `Corpus.read` returns


@pytest.mark.parametrize("vocabulary", [ByteVocabulary(), WORDS])
def test_a_vocabulary_written_and_read_is_the_same(vocabulary: ByteVocabulary | SymbolVocabulary) -> None:
    assert parse_vocabulary(vocabulary_bytes(vocabulary), "a store") == vocabulary


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"level": "word", "symbols": 3}', '{"level": "x", "symbols": []}'])
def test_a_damaged_vocabulary_is_refused_with_its_location(text: str) -> None:
    with pytest.raises(DataError, match=r"^data/store: the vocabulary (can't be read|is damaged)"):
        parse_vocabulary(text.encode(), "data/store")


def test_tokens_take_the_fewest_bytes_that_hold_the_vocabulary() -> None:
    assert [token_dtype(n).itemsize for n in (2, 256, 257, 65536, 65537)] == [1, 1, 2, 2, 4]
