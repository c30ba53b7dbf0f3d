"""Text of subwords whose tokenizer is not byte-level."""

from pathlib import Path

import numpy as np
import pytest

from helpers.untrained_model import untrained
from stretto.data import TextOptions, prepare_text
from stretto.errors import ConfigError
from stretto.serve import generate
from stretto.serve.generation import _TokenDecoder
from stretto.store.subwords import SubwordVocabulary

tokenizers = pytest.importorskip("tokenizers")


def test_a_tokenizer_that_drops_white_space_needs_a_prompt(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "theme": 1, "[UNK]": 2}, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "my.json"))
    (tmp_path / "a.txt").write_text("the theme\n" * 50)
    prepare_text(tmp_path / "a.txt", tmp_path / "data", TextOptions(tokenizer=tmp_path / "my.json"), workers=1)
    trained = untrained(tmp_path / "data", lanes=2, window=10)
    with pytest.raises(
        ConfigError, match="prompt='' has no tokens; start the text with a word, such as prompt=\"The\""
    ):
        next(generate(trained))
    assert next(generate(trained, "the"))


def test_pieces_join_to_the_text_that_the_tokenizer_decodes(tmp_path: Path) -> None:
    bytes_of_an_accent = {"<0xC3>": 3, "<0xA9>": 4}
    model = tokenizers.models.BPE({"[UNK]": 0, "\u2581a": 1, "b": 2, **bytes_of_an_accent}, [], unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    byte_fallback, metaspace = tokenizers.decoders.ByteFallback(), tokenizers.decoders.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Sequence([byte_fallback, metaspace])
    vocabulary = SubwordVocabulary.parse(tokenizer.to_str().encode(), "my.json")
    tokens = [1, 3, 4, 2, 1, 4, 3, 4, 1]
    decoder = _TokenDecoder(vocabulary, "a b", np.array([1, 2]))
    pieces = [decoder.add(token, is_last=number == len(tokens)) for number, token in enumerate(tokens, 1)]
    assert pieces[:4] == [" a", "", "\u00e9", "b"]
    assert "ab" + "".join(pieces) == vocabulary.decode([1, 2, *tokens])
