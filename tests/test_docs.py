"""README and docs hold what they say: snippets run, links lead somewhere, every config field is listed."""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib import import_module
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from config_page import config_page
from reference_page import reference_pages
from stretto import load_config
from stretto.base.errors import ConfigError
from stretto.cli.commands.prepare import KINDS
from stretto.cli.main import COMMANDS, main, run_command
from stretto.cli.parser import Parser

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / ".github").rglob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# Pages of docs/reference/ that are not about a Python namespace.
OTHER_REFERENCE_PAGES = {"commands.md", "config.md", "errors.md"}


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def snippets(page: Path, language: str = "python") -> list[str]:
    """The blocks of a page in this language that have no title."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def steps(page: Path) -> list[tuple[str, str, str]]:
    """The snippets of a page in order, each with its command and its output, if the page has them."""
    pattern = r"^```python\n(.*?)^```(?:\n+or `stretto (prepare .*?)`)?(?:\n+It prints:\n+```text\n(.*?)^```)?"
    return re.findall(pattern, page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.long
@pytest.mark.short
@pytest.mark.parametrize(
    "page", [page for page in PAGES if ROOT / "docs" in page.parents and snippets(page)], ids=page_id
)
def test_the_snippets_of_a_page_run_one_after_the_other(
    page: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_bytes(text_file.read_bytes())
    names: dict[str, object] = {"__name__": "snippet"}
    for code, command, output in steps(page):
        capsys.readouterr()
        exec(compile(code, str(page), "exec"), names)
        if output:
            assert_similar_output(capsys.readouterr().out, output)
        if command:
            assert main(shlex.split(command.replace("--out data/", "--out command/"))) == 0
            assert_same_files(tmp_path / "command", tmp_path / "data")


def titled_files(page: Path) -> dict[str, str]:
    """The blocks of a page that have the name of a file as their title."""
    return dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', page.read_text(), re.MULTILINE | re.DOTALL))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_files_and_commands_of_the_page_about_your_own_lstm_work(tmp_path: Path) -> None:
    page = ROOT / "docs" / "how-to" / "bring-your-own-lstm.md"
    for name, content in titled_files(page).items():
        (tmp_path / name).write_text(content)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = ""
    for line in "".join(snippets(page, "bash")).splitlines():
        command = [sys.executable, *(["-m"] if line.startswith("stretto ") else []), *shlex.split(line)]
        command = [word for word in command if word != "python"]
        if line == "stretto train run.toml":
            preempt(command, tmp_path, environment)
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, (line, done.stderr)
        printed += done.stdout
    assert (
        "resume  after step " in printed and "done: config, log, checkpoints and weights are in runs/power" in printed
    )
    (shown,) = re.findall(r"It prints:\n+```text\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert printed.endswith(shown)


def preempt(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Start a run, and stop it with SIGTERM after its first step, as the page advises."""
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    log, until = folder / "runs" / "power" / "log.jsonl", time.monotonic() + 120
    while not (log.exists() and '"kind": "step"' in log.read_text()):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75


def assert_similar_output(printed: str, shown: str) -> None:
    """Assert equal text; losses may differ a little, as rounding and Python's manual differ between machines."""
    decimal = r"\d+\.\d+"
    assert re.sub(decimal, "_", printed) == re.sub(decimal, "_", shown)
    numbers, shown_numbers = ([float(number) for number in re.findall(decimal, text)] for text in (printed, shown))
    assert numbers == pytest.approx(shown_numbers, rel=0.15, abs=0.02)


def assert_same_files(one: Path, other: Path) -> None:
    for path in one.rglob("*.*"):
        assert path.read_bytes() == (other / path.relative_to(one)).read_bytes()


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page, "toml")], ids=page_id)
def test_the_configs_of_a_page_can_be_read(page: Path, tmp_path: Path) -> None:
    for number, text in enumerate(snippets(page, "toml")):
        path = tmp_path / f"{number}.toml"
        # A piece without data is about another section.
        path.write_text(text if "[data]" in text else f'{text}\n[data]\ntrain = "data"\n')
        load_config(path)


def test_readme_has_no_figure_that_is_still_to_be_measured() -> None:
    cells = re.findall(r"\|([^|\n]*)(?=\|)", (ROOT / "README.md").read_text())
    assert not [cell for cell in cells if re.fullmatch(r"\s*[A-Z]{4,}\s*", cell)]


def test_readme_shows_the_first_example_as_it_is() -> None:
    _, shown = snippets(ROOT / "README.md")
    example = (ROOT / "examples" / "01_first_model.py").read_text()
    assert example.endswith(shown)
    assert shown.count("\n") <= 30


def test_readme_and_docs_install_stretto_in_the_same_way() -> None:
    pages = (ROOT / "README.md", ROOT / "docs" / "index.md")
    readme, index = (snippets(page, "bash")[0].splitlines() for page in pages)
    num_lines = index.index("stretto train run.toml") + 1
    assert readme[:num_lines] == index[:num_lines]


def prose(page: Path) -> str:
    """A page without its blocks of code, whose lines may look like headings."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names that headings can be linked by, as the site and the repository's host make them."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        name = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        # The site makes one hyphen of several.
        found |= {name, re.sub("-+", "-", name)} if not seen[name] else {f"{name}-{seen[name]}", f"{name}_{seen[name]}"}
        seen[name] += 1
    return found


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        target, _, anchor = link.partition("#")
        if ":" in target:
            parts = urlsplit(link)
            assert parts.scheme == "https" and "." in parts.netloc, link
            continue
        path = page.parent / target if target else page
        assert path.is_file(), link
        assert not anchor or anchor in anchors(path), link


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_of_the_repository_that_a_page_names_are_there(page: Path) -> None:
    for name in re.findall(
        r"(?<![\w/.-])((?:examples|benchmarks|tests|src|docs|\.ci|\.github)/[\w./-]*\w)", page.read_text()
    ):
        # A room, or a file; where a run or another package has a folder of that name, it says so in other words.
        assert (ROOT / name).exists(), name


class ParsedError(Exception):
    """A command's options were understood, and it is not to run."""


@pytest.fixture
def _parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands end when they have understood their options."""
    whole = Parser.parse_all

    def parse_only(parser: Parser, arguments: list[str]) -> argparse.Namespace:
        options = whole(parser, arguments)
        # What is left over is for another parser: this one has only chosen it.
        if "arguments" in options:
            return options
        raise ParsedError

    monkeypatch.setattr(Parser, "parse_all", parse_only)


# Every line of errors.md is a mistake, and made by a test of its own.
@pytest.mark.usefixtures("_parse_only")
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "errors.md"], ids=page_id)
def test_commands_that_a_page_shows_have_the_options_that_it_shows(page: Path) -> None:
    shown = [line for code in snippets(page, "bash") for line in code.splitlines() if line.startswith("stretto ")]
    mentioned = re.findall(r"`(stretto [a-z][^`]*)`", prose(page))
    for command in shown:
        for arguments in ways_to_type(command):
            assert_understood(arguments)
    for command in mentioned:
        for arguments in ways_to_type(command):
            assert_understood(arguments, is_whole=False)


@pytest.mark.usefixtures("_parse_only")
@pytest.mark.parametrize(
    "command", [*(name for name in COMMANDS if name != "prepare"), *(f"prepare {kind}" for kind in KINDS)]
)
def test_the_help_of_a_command_has_an_example_that_is_understood(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    examples = re.findall(r"^ +(stretto .*)$", capsys.readouterr().out.partition("example")[2], re.MULTILINE)
    assert examples
    for example in examples:
        for arguments in ways_to_type(example):
            assert_understood(arguments)


def assert_understood(arguments: list[str], is_whole: bool = True) -> None:
    """Assert that a command takes these arguments; if they are not the whole, something is put where it is missing."""
    try:
        with pytest.raises(ParsedError):
            run_command(arguments[0], arguments[1:])
    except ConfigError as error:
        missing = re.search("arguments are required: (.*);", str(error))
        if is_whole or missing is None:
            raise AssertionError(f"{shlex.join(arguments)}: {error}") from None
        given = [[name, "some"] if name.startswith("-") else ["some"] for name in missing[1].split(", ")]
        # In front, for an option at the end may take all that follow it.
        kind = 2 if arguments[0] == "prepare" else 1
        assert_understood([*arguments[:kind], *chain.from_iterable(given), *arguments[kind:]])


def ways_to_type(command: str) -> list[list[str]]:
    """The ways in which a command that a page shows may be typed; none where it is only named."""
    command = command.replace("\\|", "|").replace("...", "")
    # A comment, and what the shell does with it or puts into it.
    command = re.sub(r"\s+#.*|\s*[>;].*", "", re.sub(r"\$\(.*\)", "FILE", command))
    plain = shlex.split(re.sub(r"\[.*?\]", "", command))[1:]
    if plain[1:] == [] and plain != ["schema"]:
        assert plain[0] in COMMANDS, command
        return []
    options = [shlex.split(way) for words in re.findall(r"\[(.*?)\]", command) for way in words.split(" | ")]
    # `A|B` is a choice, `--section.field` stands for every field, N for a number.
    return [
        [re.sub(r"\|.*", "", word).replace("N", "1") if word == "N" or "|" in word else word for word in way]
        for way in [plain, *([*plain, *option] for option in options if "--section.field" not in option)]
    ]


def test_the_config_page_is_made_from_the_config() -> None:
    page = (ROOT / "docs" / "reference" / "config.md").read_text()
    assert page == config_page(), "run: python tests/config_page.py > docs/reference/config.md"


def test_the_reference_is_made_from_the_docstrings() -> None:
    folder = ROOT / "docs" / "reference"
    pages = {page.name: page.read_text() for page in folder.glob("*.md") if page.name not in OTHER_REFERENCE_PAGES}
    assert pages == reference_pages(), "run: python tests/reference_page.py docs/reference"


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert all(f"`stretto {command}" in page for command in COMMANDS)


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    docs = ROOT / "docs"
    assert all(f": {page.relative_to(docs)}\n" in navigation for page in docs.rglob("*.md"))


@pytest.mark.parametrize(
    "path",
    [ROOT / "CITATION.cff", ROOT / "mkdocs.yml", *sorted((ROOT / ".github").rglob("*.yml"))],
    ids=page_id,
)
def test_what_a_host_reads_of_the_repository_can_be_read(path: Path) -> None:
    assert isinstance(import_module("yaml").safe_load(path.read_text()), dict)
