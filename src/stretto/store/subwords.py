"""SubwordVocabulary: text to subwords and back, by a tokenizer of Hugging Face's `tokenizers`."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from stretto.base.bounded_read import parse_json
from stretto.base.errors import DataError
from stretto.base.extras import import_optional_dependency
from stretto.base.reason import class_and_reason

MAX_TOKENS = 1_000_000
_LINE = re.compile(r"[^\n]*\n|[^\n]+")


@dataclass(frozen=True)
class SubwordVocabulary:
    """The tokens of a tokenizer. Each line of a text is encoded by itself, so a text may be cut between lines.

    Only `encode` needs the package `tokenizers`, and `decode` if the tokenizer is not byte-level.
    """

    tokenizer_json: str = field(repr=False)
    level: Literal["subword"] = "subword"
    # From the JSON: the text of each token, as the tokenizer writes it, and the token for what it doesn't know.
    _names: dict[int, str] = field(init=False, repr=False, compare=False)
    unknown_token: int | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        tree = json.loads(self.tokenizer_json)
        model = tree["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, list):  # a Unigram model: pairs of text and score
            names, unknown = {token: str(pair[0]) for token, pair in enumerate(vocabulary)}, model.get("unk_id")
        else:
            names, unknown = {int(token): text for text, token in vocabulary.items()}, None
            unknown = vocabulary.get(model.get("unk_token"))
        names.update({int(token["id"]): str(token["content"]) for token in tree.get("added_tokens") or ()})
        if not names or min(names) < 0:
            raise ValueError("it has no tokens, or a negative one")
        if max(names) >= MAX_TOKENS:
            raise ValueError(f"it has token {max(names):,}, but tokens must be below {MAX_TOKENS:,}")
        object.__setattr__(self, "_names", names)
        object.__setattr__(self, "unknown_token", unknown)

    @classmethod
    def from_tree(cls, tree: dict[str, Any], source: str) -> Self:
        """Return the vocabulary of a tokenizer, given the content of its JSON file; errors name `source`."""
        try:
            # A token must not depend on chance or on how long its text is.
            model = {**tree["model"], "dropout": None} if "dropout" in tree["model"] else tree["model"]
            tree = {**tree, "model": model, "truncation": None, "padding": None}
            return cls(json.dumps(tree, ensure_ascii=False))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"{source}: not a tokenizer of Hugging Face's tokenizers ({class_and_reason(error)})"
            raise DataError(f"{problem}; use a file that Tokenizer.save wrote") from None

    @classmethod
    def parse(cls, content: bytes, source: str) -> Self:
        """Return the vocabulary of a `tokenizer.json`, which must also be readable by `tokenizers`."""
        try:
            tree = parse_json(content)
        except ValueError as error:
            raise DataError(f"{source}: not a JSON file ({error}); use a file that Tokenizer.save wrote") from None
        vocabulary = cls.from_tree(tree, source)
        try:
            # Some ids in a file are ignored by the package, such as those of added tokens that it numbers itself.
            if set(vocabulary._tokenizer.get_vocab().values()) != vocabulary._names.keys():
                raise ValueError("tokenizers reads it with other tokens than those it lists")
        except ValueError as error:
            raise DataError(f"{source}: {error}; use a file that Tokenizer.save wrote") from None
        return vocabulary

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the tokenizer, which another process builds if it needs it."""
        return {name: value for name, value in self.__dict__.items() if name != "_tokenizer"}

    def __len__(self) -> int:
        return max(self._names) + 1

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether each token stands for a fixed string of bytes, so that no text is lost."""
        return (json.loads(self.tokenizer_json).get("decoder") or {}).get("type") == "ByteLevel"

    @cached_property
    def _tokenizer(self) -> Any:  # noqa: ANN401 - a tokenizers.Tokenizer
        tokenizers = import_optional_dependency("tokenizers", "tokenizers", "a subword vocabulary")
        try:
            return tokenizers.Tokenizer.from_str(self.tokenizer_json)
        except Exception as error:  # noqa: BLE001 - the package raises nothing more specific
            raise ValueError(f"tokenizers can't read it ({error})") from None

    def encode(self, text: bytes | str) -> NDArray[np.uint32]:
        lines = split_lines(text if isinstance(text, str) else text.decode("utf-8"))
        tokenizer = self._tokenizer
        try:
            encodings = tokenizer.encode_batch_fast(lines, add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - a panic of Rust is no Exception
            problem = f"the tokenizer of {len(self):,} subwords can't encode a text ({error})"
            raise DataError(f"{problem}; use a different tokenizer.json") from None
        return np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), np.uint32)

    def decode(self, tokens: Iterable[int]) -> str:
        if self.is_byte_level:
            return b"".join(map(self.token_bytes, tokens)).decode("utf-8", errors="replace")
        text: str = self._tokenizer.decode(list(map(int, tokens)), skip_special_tokens=False)
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token of a byte-level tokenizer stands for; empty if no token has this number."""
        name = self._names.get(int(token), "")
        # A token that was added by hand is its own text.
        return bytes(map(_BYTES.__getitem__, name)) if _BYTES.keys() >= set(name) else name.encode()


def split_lines(text: str) -> list[str]:
    """Return the lines of a text, each with its line feed."""
    return _LINE.findall(text)


def _byte_names() -> dict[str, int]:
    """Return the byte that each character of a byte-level token stands for.

    A byte that is a visible Latin-1 character is written as that character. The others, such as the space, are
    written as the characters from U+0100 on, in order.
    """
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {**{chr(byte): byte for byte in visible}, **{chr(256 + index): byte for index, byte in enumerate(hidden)}}


_BYTES = _byte_names()
