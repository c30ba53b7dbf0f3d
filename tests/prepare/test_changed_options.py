"""After an interruption, a start with other options prepares only the parts that these options change."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from helpers.prepared_files import content
from stretto.data import SequenceOptions, SeriesOptions, TextOptions, prepare_sequences, prepare_series, prepare_text
from stretto.errors import DataError
from stretto.prepare.part_runner import PartRunner
from stretto.prepare.prepare_job import Progress

Options = TextOptions | SequenceOptions | SeriesOptions


@dataclass(frozen=True)
class Attempts:
    """Prepares the same files several times, and counts the parts of each phase that are run."""

    prepare: Callable[..., Any]
    files: list[Path]
    folder: Path
    num_run: Counter[str]

    def interrupt(self, options: Options) -> dict[str, int]:
        """Prepare all parts, but not the stores; return how many were run in each phase."""

        def stop(progress: Progress) -> None:
            if progress.phase.startswith("writing") and progress.done == progress.total:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self._run(options, self.folder / "out", stop)
        return self._counts()

    def finish(self, options: Options) -> dict[str, int]:
        """Prepare the rest; return how many parts were run. Check that the result is that of a single attempt."""
        self._run(options, self.folder / "out")
        counts = self._counts()
        self._run(options, self.folder / "whole")
        assert content(self.folder / "out") == content(self.folder / "whole")
        assert {path.name for path in (self.folder / "out").rglob("*")} == {
            path.name for path in (self.folder / "whole").rglob("*")
        }
        assert not (self.folder / "out.partial").exists()
        return counts

    def _counts(self) -> dict[str, int]:
        counts = dict(self.num_run)
        self.num_run.clear()
        return counts

    def _run(
        self, options: Options, target: Path, on_progress: Callable[[Progress], None] = lambda progress: None
    ) -> None:
        with ThreadPoolExecutor(1) as executor:
            self.prepare(self.files, target, options, executor=executor, on_progress=on_progress)


@pytest.fixture
def num_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How many parts of each phase have run. The keys of tasks must be the same in each process."""
    counts: Counter[str] = Counter()
    run = PartRunner.__call__

    def count(runner: PartRunner[Any], number: int, part: object) -> int:
        assert not re.search(r" at 0x[0-9a-f]+>", repr(runner.task) + repr(part)), runner.name
        counts[runner.name] += 1
        return run(runner, number, part)

    monkeypatch.setattr(PartRunner, "__call__", count)
    monkeypatch.setattr("stretto.prepare.prepare_text._COUNTED_BYTES", 150)
    yield counts


@pytest.fixture
def text(tmp_path: Path, num_run: Counter[str]) -> Attempts:
    """Four files of 92 bytes: the words are counted in three parts, and written in four if a shard has 92 bytes."""
    files = [tmp_path / f"{name}.txt" for name in "abcd"]
    for number, path in enumerate(files):
        path.write_text(f"one two w{number}\n" * 8 + "end\n")
    assert {path.stat().st_size for path in files} == {92}
    return Attempts(prepare_text, files, tmp_path, num_run)


WORDS = TextOptions(level="word", shard_bytes=92)


def test_another_vocabulary_size_or_shard_size_does_not_count_words_again(text: Attempts) -> None:
    assert text.interrupt(WORDS) == {"count": 3, "write": 4}
    assert text.interrupt(WORDS) == {}
    assert text.interrupt(replace(WORDS, max_symbols=4)) == {"write": 4}
    assert text.interrupt(replace(WORDS, shard_bytes=184)) == {"write": 2}
    assert text.interrupt(replace(WORDS, level="char")) == {"count": 3, "write": 4}
    assert text.finish(replace(WORDS, level="char", max_symbols=9)) == {"write": 4}


def test_another_validation_split_writes_only_the_parts_that_it_moves(text: Attempts) -> None:
    byte = TextOptions(shard_bytes=92)
    assert text.interrupt(byte) == {"write": 4}
    # The last quarter of the text is its last part, and the last half are its last two.
    assert text.interrupt(replace(byte, validation_fraction=0.255)) == {}
    assert text.interrupt(replace(byte, validation_fraction=0.505)) == {}
    assert text.interrupt(replace(byte, validation_fraction=0.4)) == {"write": 3}
    assert text.finish(replace(byte, validation_fraction=0.255)) == {"write": 2}


def test_another_validation_split_counts_only_the_end_of_the_training_text(text: Attempts) -> None:
    assert text.interrupt(replace(WORDS, validation_fraction=0.255))["count"] == 2
    # The vocabulary changes, as a word is only in the last file: all tokens are written again.
    assert text.interrupt(replace(WORDS, validation_fraction=0.01)) == {"count": 2, "write": 5}


def test_another_file_is_prepared_alone(text: Attempts) -> None:
    assert text.interrupt(TextOptions(shard_bytes=92)) == {"write": 4}
    more = text.folder / "e.txt"
    more.write_text("end\n")
    assert replace(text, files=[*text.files, more]).finish(TextOptions(shard_bytes=92)) == {"write": 1}


def test_a_tokenizer_is_trained_again_only_for_another_size(text: Attempts) -> None:
    subwords = TextOptions(tokenizer="bpe:260", shard_bytes=92)
    assert text.interrupt(subwords) == {"tokenizer": 1, "write": 4}
    assert text.interrupt(replace(subwords, shard_bytes=184)) == {"write": 2}
    assert text.finish(replace(subwords, tokenizer="bpe:258", shard_bytes=184)) == {"tokenizer": 1, "write": 2}


@pytest.fixture
def records(tmp_path: Path, num_run: Counter[str]) -> Attempts:
    files = [tmp_path / f"{name}.jsonl" for name in "abc"]
    for number, path in enumerate(files):
        rows = [{"text": f"w{row * number % 5} end", "label": row % 2, "tokens": [row, number]} for row in range(9)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Attempts(prepare_sequences, files, tmp_path, num_run)


def test_options_of_sequences_redo_only_what_they_touch(records: Attempts) -> None:
    words = SequenceOptions(level="word", label="label", sequence="text")
    assert records.interrupt(words) == {"scan": 3, "write": 3}
    # Without a validation split, the seed is not used; and no row is bad.
    assert records.interrupt(replace(words, seed=7, bad_rows="skip")) == {}
    assert records.interrupt(replace(words, max_symbols=3)) == {"write": 3}
    assert records.interrupt(replace(words, validation_fraction=0.5)) == {"scan": 3, "write": 3}
    assert records.interrupt(replace(words, validation_fraction=0.5, seed=1)) == {"scan": 3, "write": 3}
    assert records.finish(replace(words, label=None)) == {"scan": 3, "write": 3}


def test_the_largest_token_and_the_classes_do_not_depend_on_the_split(records: Attempts) -> None:
    tokens = SequenceOptions(sequence="tokens", label="label")
    assert records.interrupt(tokens) == {"scan": 3, "write": 3}
    assert records.interrupt(replace(tokens, validation_fraction=0.5)) == {"write": 3}
    # The classes are still unknown, but the number of tokens is not.
    assert records.finish(replace(tokens, num_tokens=50)) == {"scan": 3, "write": 3}


@pytest.mark.parametrize("level", ["word", "byte"])
def test_after_a_bad_row_is_found_only_its_part_is_read_again_to_skip_it(records: Attempts, level: Any) -> None:  # noqa: ANN401
    options = SequenceOptions(level=level, sequence="text")
    good = records.files[2].read_text()
    records.files[2].write_text(good + "damaged\n")
    with pytest.raises(DataError, match=r"c\.jsonl, row 10: .*bad_rows=skip"):
        records._run(options, records.folder / "out")
    phases = ["scan", "write"] if level == "word" else ["write"]
    assert records._counts() == {phases[0]: 3}
    skip = replace(options, bad_rows="skip")
    assert records.interrupt(skip) == {phase: 1 if phase == phases[0] else 3 for phase in phases}
    # And back: what skipped a row is not the result of a start that allows none.
    with pytest.raises(DataError, match=r"c\.jsonl, row 10: .*bad_rows=skip"):
        records._run(options, records.folder / "out")
    assert records._counts() == {phases[0]: 1}
    records.files[2].write_text(good)
    records.finish(options)


def test_a_tokenizer_that_has_read_no_bad_row_is_not_trained_again_to_skip_them(
    records: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.prepare.tokenizer._MAX_TRAINING_BYTES", 100)  # not up to the end of a file
    options = SequenceOptions(tokenizer="bpe:260", sequence="text")
    records.files[2].write_text(records.files[2].read_text() + "damaged\n")
    with pytest.raises(DataError, match=r"c\.jsonl, row 10: .*bad_rows=skip"):
        records._run(options, records.folder / "out")
    assert records._counts() == {"tokenizer": 1, "write": 3}
    assert records.interrupt(replace(options, bad_rows="skip")) == {"write": 1}
    # But one that may have skipped a row is, if bad rows are an error now.
    records.files[0].write_text(records.files[0].read_text().replace("\n", "\ndamaged\n", 1))
    assert records.interrupt(replace(options, bad_rows="skip"))["tokenizer"] == 1
    with pytest.raises(DataError, match=r"a\.jsonl, row 2: .*bad_rows=skip"):
        records._run(options, records.folder / "out")
    assert records._counts() == {"tokenizer": 1}


def test_options_of_series_redo_only_what_they_touch(tmp_path: Path, num_run: Counter[str]) -> None:
    files = [tmp_path / f"{name}.csv" for name in "abc"]
    for path in files:
        rows = [f"{row},{row % 3},{'up' if row % 2 else 'down'},{'red' if row % 5 else 'blue'}" for row in range(20)]
        path.write_text("\n".join(["x,y,trend,color", *rows]))
    series = Attempts(prepare_series, files, tmp_path, num_run)
    options = SeriesOptions(columns=("x", "y", "color"), targets=("trend",))
    assert series.interrupt(options) == {"categories": 3, "scan": 3, "write": 3}
    assert series.interrupt(replace(options, known_future=("y",), bad_rows="skip")) == {}
    assert series.interrupt(replace(options, validation_fraction=0.3)) == {"write": 3}
    assert series.interrupt(replace(options, columns=("x", "color"))) == {"write": 3}
    assert series.interrupt(replace(options, columns=("x", "y"))) == {"write": 3}
    assert series.finish(replace(options, targets=None)) == {"write": 3}
