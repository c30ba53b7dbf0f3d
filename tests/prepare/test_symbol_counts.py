import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.data import TextOptions, prepare_text
from stretto.prepare import symbol_counts
from stretto.prepare.work_folder import open_work_folder
from stretto.store.vocabulary import SymbolVocabulary, split_symbols

LINES = st.lists(st.text(st.sampled_from("ab\u00e9\U0001f600\t\r <unk>\\n"), max_size=12), min_size=1, max_size=30)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(lines=LINES, level=st.sampled_from(["char", "word"]), max_symbols=st.sampled_from([None, 2, 5]))
def test_spilled_and_merged_counts_give_the_most_frequent_symbols(
    lines: list[str],
    level: Literal["char", "word"],
    max_symbols: int | None,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With hardly any memory: each part spills often, and its files are merged two at a time."""
    monkeypatch.setattr(symbol_counts, "_MAX_COUNTED", 2)
    monkeypatch.setattr(symbol_counts, "_MAX_MERGED", 2)
    monkeypatch.setattr("stretto.prepare.prepare_text._COUNTED_BYTES", 20)
    folder, text = tmp_path_factory.mktemp("counts"), "\n".join(lines) + "\nend\n"
    (folder / "a.txt").write_bytes(text.encode())
    options = TextOptions(level=level, max_symbols=max_symbols, shard_bytes=20)
    (corpus,) = prepare_text(folder / "a.txt", folder / "out", options, workers=1)
    counts = Counter(split_symbols(text, level))
    ranked = sorted(counts.keys() - {"<unk>"}, key=lambda symbol: (-counts[symbol], symbol))
    assert isinstance(corpus.vocabulary, SymbolVocabulary)
    assert corpus.vocabulary.symbols == ("<unk>", *ranked[: None if max_symbols is None else max_symbols - 1])


def test_a_part_that_spills_often_has_few_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbol_counts, "_MAX_COUNTED", 2)
    folder = open_work_folder(tmp_path / "out")
    (tmp_path / "out.partial" / "parts").mkdir(parents=True)
    counter, limits = symbol_counts.SymbolCounter("word"), resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 110, limits[1]))
    try:
        for number in range(1500):
            counter.update([f"w{number}", "often"])
        counter.write(folder, "counts")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    expected = sorted([*(f"w{number}\t1" for number in range(1500)), "often\t1500"])
    assert folder.read("counts").decode().splitlines() == expected


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_different_words(tmp_path: Path) -> None:
    check_memory(tmp_path, num_words=600_000, max_counted=20_000, max_bytes=225_000_000)


@pytest.mark.slow
def test_ten_million_different_words_are_counted_in_less_than_a_gigabyte(tmp_path: Path) -> None:
    check_memory(tmp_path, num_words=10_000_000, max_counted=None, max_bytes=1_000_000_000)


def check_memory(folder: Path, num_words: int, max_counted: int | None, max_bytes: int) -> None:
    """Prepare a text in a process that can't have more address space; each word occurs once, some more often."""
    with (folder / "a.txt").open("w") as file:
        for start in range(0, num_words, 1000):
            # In an order that is not sorted; 7,368,787 is prime.
            numbers = [index * 7_368_787 % num_words for index in range(start, start + 1000)]
            file.write(" ".join(f"w{number:x}" for number in numbers) + f" often{start % 20_000}\n")
    script = (
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({max_bytes}, {max_bytes}))\n"
        "from stretto.prepare import symbol_counts\n"
        "from stretto.prepare.prepare_text import TextOptions, prepare_text\n"
        f"symbol_counts._MAX_COUNTED = {max_counted} or symbol_counts._MAX_COUNTED\n"
        "options = TextOptions(level='word', max_symbols=1000)\n"
        f"(corpus,) = prepare_text({str(folder / 'a.txt')!r}, {str(folder / 'out')!r}, options, workers=1)\n"
        "often = [symbol for symbol in corpus.vocabulary.symbols if symbol.startswith('often')]\n"
        "assert len(corpus.vocabulary) == 1000 and corpus.vocabulary.symbols[1] == '<eos>', corpus.vocabulary\n"
        "assert len(often) == 20, often\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=280)
