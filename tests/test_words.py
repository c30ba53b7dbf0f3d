"""Plain words: no phrases of a private dialect in docs, docstrings or messages, and each class name once."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# What nobody would say at a whiteboard, and what to say instead.
PHRASES = {
    r"\bmend(s|ed)?\b": "fix",
    r"\bgo(es)? on from\b|\bwent on from\b|\bgone on\b": "resume, continue",
    r"\bcut off\b": "interrupted",
    r"\bis not there\b|\baren't there\b": "does not exist",
    r"\bis no (file|number|folder|text)\b": "is not a file",
    r"\bknown are\b": "choose from",
    r"\bgive another\b": "choose a different",
    r"digest is another": "checksum mismatch",
    r"\bheld[ -]out\b|\bhold[ -]out\b": "validation",
    r"\b(thread|lane|lanes|second|seconds|nats|bits) a (rank|GPU|step|byte|second|token)\b": "per rank",
    r"\bfor ever\b": "forever",
    r"\bnought\b": "zero",
    r"\bforetold\b|\bforetell": "predicted",
    r"\bbelongs? into\b": "belongs in",
    r"\band the like\b|\bor the like\b": "such",
    r"\bwhat (was|is) asked\b": "targets",
    r"\bnone if\b": "None if",
    r"\badds? up\b|\badded up\b|\badding up\b": "sum, all-reduce",
    r"\b(rooms?|floors?) (of the house|below|above)\b|\bthe house\b": "package, level",
    r"\bslices? of (rows|a replica)": "micro-batch",
    r"\bFive minutes\b|\bBeside its peers\b|\bHonest limits\b|\bThe plan on paper\b": "a plain heading",
    r"\bTo the (dark|light)\b": "Dark mode, Light mode",
}


def texts_of_source(path: Path) -> list[tuple[int, str]]:
    """Every string (docstrings and messages are strings) and comment of a module, each with its line."""
    source = path.read_text()
    texts = [
        (node.lineno, node.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    comments = [(number, line) for number, line in enumerate(source.splitlines(), 1) if re.match(r"\s*#", line)]
    return [*texts, *comments]


def texts_of_page(path: Path) -> list[tuple[int, str]]:
    return list(enumerate(path.read_text().splitlines(), 1))


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_phrase_of_the_old_dialect_is_used(path: Path) -> None:
    texts = texts_of_source(path) if path.suffix == ".py" else texts_of_page(path)
    slips = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]!r}; write: {better}"
        for line, text in texts
        for pattern, better in PHRASES.items()
        for match in re.finditer(pattern, " ".join(text.split()))
    ]
    assert slips == []


def test_a_phrase_of_the_old_dialect_is_noticed(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('raise ValueError(f"{1} is not there; mend it")  \n')
    found = [pattern for pattern in PHRASES for _, text in texts_of_source(module) if re.search(pattern, text)]
    assert len(found) == 2


# Names and words of what was taken out; nothing may refer to it.
GONE = re.compile(
    r"live[ _-]recovery|LiveTrainer|live_trainer|LiveAgent|LiveWorld|RanksChange|StateLost|rank_change|RankChange"
    r"|run\.recovery|copy_every|replace_straggler|lane_copy|PeerMemory|Request\.REGROUP|STRETTO_(HOSTS|REPLICA|PROCESS)",
    re.IGNORECASE,
)


def test_nothing_refers_to_what_was_taken_out() -> None:
    folders = [ROOT / name for name in ("src", "tests", "docs", "examples", "benchmarks", ".ci", ".github")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix not in (".pyc", ".png")]
    slips = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]}"
        for path in [*files, *ROOT.glob("*.*")]
        if path.is_file() and path != Path(__file__)
        for line, text in enumerate(path.read_text(errors="ignore").splitlines(), 1)
        for match in GONE.finditer(text)
    ]
    assert slips == []


def test_each_class_name_is_defined_once() -> None:
    homes = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path.relative_to(ROOT)))
    # Regions take these names over from the engine, which goes with the issue "One way to train".
    assert {name for name, paths in homes.items() if len(paths) > 1} == {"Layout", "Stack"}


def test_no_function_is_60_lines_long_or_has_more_than_8_parameters() -> None:
    wrong = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = node.args
                names = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                num_parameters = len(names) - (names[:1] in (["self"], ["cls"]))
                # A Triton kernel takes pointers and sizes one by one; it can't take an object.
                is_kernel = any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                if num_lines >= 60 or (num_parameters > 8 and not is_kernel):
                    wrong.append(
                        f"{path.relative_to(ROOT)}: {node.name}: {num_lines} lines, {num_parameters} parameters"
                    )
    assert wrong == []
