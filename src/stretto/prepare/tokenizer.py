"""Tokenizers of subwords: `bpe:8000` trains one on the text, `tokenizer.json` is one."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol

from stretto.base.bounded_read import read_bounded
from stretto.base.errors import DataError
from stretto.base.extras import import_optional_dependency
from stretto.prepare.part_runner import Part, PartIn, PartResult, PartResults
from stretto.prepare.prepare_job import Job, Progress
from stretto.prepare.saved_vocabulary import SavedVocabulary, save_vocabulary
from stretto.prepare.work_folder import WorkFolder
from stretto.store.subwords import MAX_TOKENS, SubwordVocabulary

# A tokenizer learns from at most this much of the training text, so that the words it counts fit into memory.
_MAX_TRAINING_BYTES = 256 << 20
_MAX_TRAINING_PARTS = 256
_MIN_TOKENS = 257  # the 256 bytes are tokens


class LineReader(Protocol[PartIn]):
    """Yields the lines of a part, some at a time; its `repr` is part of that of a task, see `PartTask`."""

    def __call__(self, part: PartIn, /) -> Iterator[list[str]]: ...


def open_tokenizer(tokenizer: Path | str | None) -> SubwordVocabulary | int | None:
    """Return the vocabulary in a `tokenizer.json`, or the size of the one to train: 8000 for `bpe:8000`."""
    if tokenizer is None:
        return None
    name, _, size = str(tokenizer).partition(":")
    if name == "bpe":
        if not size.isascii() or not size.isdecimal() or not _MIN_TOKENS <= int(size) <= MAX_TOKENS:
            problem = f"tokenizer={tokenizer} has no size from {_MIN_TOKENS} to {MAX_TOKENS:,}"
            raise DataError(f"{problem}; use a size such as bpe:8000")
        return int(size)
    path = Path(tokenizer)
    if not path.is_file():
        raise DataError(f"tokenizer={tokenizer} is not a file; use bpe:SIZE, or the path of a tokenizer.json")
    return SubwordVocabulary.parse(read_bounded(path), f"tokenizer={tokenizer}")


def train_tokenizer(
    job: Job,
    parts: Sequence[Part],
    sizes: Sequence[int],
    read: LineReader[Part],
    num_tokens: int,
    *,
    may_skip_rows: bool = False,
) -> SavedVocabulary:
    """Save a BPE that is trained on the lines of all parts, in order.

    Of a large text, it is trained on the beginnings of parts that are evenly spaced, in proportion to their sizes.
    One that was trained before is used again, unless it may have skipped bad rows, and may not now.
    """
    chosen, shares = list(parts), [_MAX_TRAINING_BYTES] * len(parts)
    if sum(sizes) > _MAX_TRAINING_BYTES:
        stride = -(-len(parts) // _MAX_TRAINING_PARTS)
        chosen, sizes = chosen[::stride], sizes[::stride]
        shares = [max(1, size * _MAX_TRAINING_BYTES // sum(sizes)) for size in sizes]
    total, phase = sum(map(min, sizes, shares)), f"training {num_tokens:,} subwords"

    def on_bytes(num_bytes: int) -> None:
        job.on_progress(Progress(phase, min(num_bytes, total), total))

    # One task, because a merge depends on all counts. As a task of the job, it is not repeated after an interruption.
    task = _TrainTokenizer(read, num_tokens, tuple(shares), may_skip_rows, on_bytes)

    def is_valid(result: PartResult) -> bool:
        return may_skip_rows or not result["may_skip_rows"]

    result = job.run("tokenizer", task, [tuple(chosen)], [total], phase, _only_result, is_valid=is_valid, is_local=True)
    return save_vocabulary(job, lambda: SubwordVocabulary(result["tokenizer"]))


def _only_result(results: PartResults) -> PartResult:
    ((_, result),) = results
    return result


@dataclass(frozen=True)
class _TrainTokenizer(Generic[Part]):
    """Trains a tokenizer on the beginning of each part."""

    read: LineReader[Part]
    num_tokens: int
    shares: tuple[int, ...]  # bytes of each part to use
    may_skip_rows: bool = field(repr=False)  # as `read` does
    on_bytes: Callable[[int], None] = field(repr=False)  # runs in this process, or in that of rank 0

    def __call__(self, parts: tuple[Part, ...], number: int, folder: WorkFolder, /) -> PartResult:
        vocabulary = train_bpe(self._read_lines(parts), self.num_tokens)
        return {"tokenizer": vocabulary.tokenizer_json, "may_skip_rows": self.may_skip_rows}

    def _read_lines(self, parts: tuple[Part, ...]) -> Iterator[str]:
        done = 0
        for part, share in zip(parts, self.shares, strict=True):
            num_read = 0
            for lines in self.read(part):
                yield from lines
                num_read += sum(len(line.encode()) for line in lines)
                self.on_bytes(done + num_read)
                # A compressed file may hold more than its size says.
                if num_read >= share or done + num_read >= _MAX_TRAINING_BYTES:
                    break
            done += num_read


def train_bpe(texts: Iterable[str], num_tokens: int) -> SubwordVocabulary:
    """Return a byte-level BPE with at most `num_tokens` tokens, learned from texts; any text can be encoded with it.

    A token never crosses the end of a line, so the result depends on the lines of the texts, not on their cuts.
    """
    feature = f"tokenizer=bpe:{num_tokens}"
    tokenizers = import_optional_dependency("tokenizers", "tokenizers", feature)
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    lines = tokenizers.pre_tokenizers.Split("\n", "isolated")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([lines, byte_level(add_prefix_space=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=num_tokens, min_frequency=2, show_progress=False, initial_alphabet=byte_level.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return SubwordVocabulary.from_tree(json.loads(tokenizer.to_str()), feature)
