"""generate: samples text from a language model token by token, reproducibly from a seed."""

import codecs
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.base.errors import ConfigError, LawError
from stretto.base.keys import derive_key
from stretto.base.state import cat_rows
from stretto.base.window import Rows
from stretto.blocks.head_loss import class_outputs
from stretto.blocks.stack import Stack
from stretto.store.subwords import SubwordVocabulary
from stretto.store.vocabulary import Vocabulary
from stretto.train.trained_model import TrainedModel

_MAX_JOINED = 4  # a character has at most four bytes, each a token


@dataclass(frozen=True)
class Sampling:
    """How to sample a token from the model's logits."""

    temperature: float = 1.0
    """Below 1 is more conservative, above 1 more random; 0 always takes the most likely token."""
    top_k: int | None = None
    """Sample only from the k most likely tokens."""
    top_p: float | None = None
    """Sample only from the smallest set of tokens whose probabilities sum to at least p (nucleus sampling)."""
    seed: int = 0
    """The same seed, prompt and model give the same text."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature} must be finite and at least 0; use a value such as 0.8")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k} is less than 1; use at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} is not in (0, 1]; use a value such as 0.9")

    def draw(self, logits: NDArray[np.float64], uniform: float) -> int:
        """Return a token sampled by inverse transform from `uniform`, a random number in [0, 1)."""
        if self.temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")[: self.top_k]
        weights = np.exp((logits[order] - logits[order[0]]) / self.temperature)
        if self.top_p is not None:
            sums = np.cumsum(weights / weights.sum())
            weights = weights[: int(np.searchsorted(sums, self.top_p)) + 1]
        sums = np.cumsum(weights)
        index = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
        return int(order[min(index, len(sums) - 1)])  # the product may be rounded up to the last sum


@torch.no_grad()
def generate_tokens(
    stack: Stack,
    prompt: NDArray[np.integer],
    sampling: Sampling | None = None,
    *,
    count: int = 1,
    suppress_tokens: tuple[int, ...] = (),
) -> Iterator[list[int]]:
    """Continue a prompt endlessly: each iteration yields the next token of each of `count` texts.

    Text i depends on the seed and on i, but not on `count`. `suppress_tokens` are never sampled.
    """
    sampling = sampling or Sampling()
    if not len(prompt):
        raise ConfigError("the prompt has no tokens; use at least one")
    if count < 1:
        raise ConfigError(f"count={count} is less than 1; use at least 1")
    if stack.stride > 1:
        raise LawError(
            f"the model makes one output of each {stack.stride} time steps, so it has none for each token; generation "
            "needs blocks without a stride"
        )
    if not stack.causal:
        raise LawError("the model has a block that looks ahead in time (causal=False); generation needs causal blocks")
    stack.eval()
    device = stack.device
    generators = [random.Random(derive_key(sampling.seed, "generate", index)) for index in range(count)]
    # The prompt is run once; all texts start from the state after it.
    tokens = torch.from_numpy(np.asarray(prompt, np.int64)).to(device).unsqueeze(1)
    y, state = stack(tokens, stack.initial_state(Rows.of(1, device=device, dtype=stack.dtype)))
    last_output, state = class_outputs(stack.loss, y[-1:])[0].expand(count, -1), cat_rows([state] * count)
    while True:
        logits = last_output.double().cpu().numpy().copy()
        logits[:, list(suppress_tokens)] = -np.inf
        sampled = [sampling.draw(row, generator.random()) for row, generator in zip(logits, generators, strict=True)]
        yield sampled
        y, state = stack(torch.tensor([sampled], device=device), state)
        last_output = class_outputs(stack.loss, y[-1:])[0]


def generate(
    trained: TrainedModel, prompt: str = "", length: int = 200, sampling: Sampling | None = None, *, count: int = 1
) -> Iterator[list[str]]:
    """Continue a prompt: yield the next piece of each of `count` texts, `length` times.

    An empty prompt counts as a line break. A piece is the text of one token. It is empty if the token is a byte that
    does not complete a character. Joined, the pieces are the text after the prompt.
    """
    vocabulary = _vocabulary(trained)
    if length < 1:
        raise ConfigError(f"length={length} is less than 1; use at least 1")
    prompt_tokens = vocabulary.encode(prompt or "\n")
    if not len(prompt_tokens):
        raise ConfigError(f'prompt={prompt!r} has no tokens; start the text with a word, such as prompt="The"')
    suppress_tokens = () if vocabulary.unknown_token is None else (vocabulary.unknown_token,)
    decoders = [_TokenDecoder(vocabulary, prompt, prompt_tokens) for _ in range(count)]
    stream = generate_tokens(trained.stack, prompt_tokens, sampling, count=count, suppress_tokens=suppress_tokens)
    for number, tokens in enumerate(islice(stream, length), 1):
        yield [decoder.add(token, is_last=number == length) for decoder, token in zip(decoders, tokens, strict=True)]


class _TokenDecoder:
    """Turns a stream of tokens into pieces of text."""

    def __init__(self, vocabulary: Vocabulary, prompt: str, prompt_tokens: NDArray[np.integer]) -> None:
        self._vocabulary = vocabulary
        self._byte_decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Words are separated by spaces; the first word needs none at the start of a line or after white space.
        self._needs_space = bool(prompt) and not prompt[-1].isspace()
        # Subwords whose text is complete, and those after them: together, they show how tokens are joined.
        self._last: list[int] = prompt_tokens[-_MAX_JOINED:].tolist() if prompt else []
        self._pending: list[int] = []

    def add(self, token: int, *, is_last: bool) -> str:
        """Return the text that a token adds; the last token also ends an incomplete character."""
        if self._vocabulary.level == "byte":
            return self._byte_decoder.decode(bytes([token]), is_last)
        if isinstance(self._vocabulary, SubwordVocabulary):
            return self._add_subword(self._vocabulary, token, is_last)
        symbol = self._vocabulary.decode([token])
        if self._vocabulary.level == "char":
            return symbol
        piece = f" {symbol}" if self._needs_space and symbol != "\n" else symbol
        self._needs_space = symbol != "\n"
        return piece

    def _add_subword(self, vocabulary: SubwordVocabulary, token: int, is_last: bool) -> str:
        if vocabulary.is_byte_level:
            return self._byte_decoder.decode(vocabulary.token_bytes(token), is_last)
        # Other tokenizers join tokens in their own ways, such as with a space before some: decode them with the last.
        self._pending.append(token)
        text = vocabulary.decode([*self._last, *self._pending])
        if text.endswith("\ufffd") and len(self._pending) < _MAX_JOINED and not is_last:
            return ""  # a byte that does not complete a character
        piece = text[len(vocabulary.decode(self._last)) :]
        self._last, self._pending = self._pending, []
        return piece


def _vocabulary(trained: TrainedModel) -> Vocabulary:
    vocabulary, targets = trained.data_spec.vocabulary, trained.data_spec.task.targets
    if targets != "next_token":
        raise ConfigError(f"the run's model predicts {targets}, so it can't generate text; use a run on text")
    if vocabulary is None:
        raise ConfigError("the run's data has no vocabulary; use stretto.serve.generate_tokens, which takes tokens")
    return vocabulary
