"""README and docs hold what they say: snippets run, links lead somewhere, every config field is listed."""

import re
import shlex
from pathlib import Path

import pytest

from config_page import config_page
from stretto import load_config
from stretto.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def steps(page: Path) -> list[tuple[str, str]]:
    """The snippets of a page in order, each with the command that the page says does the same, if it does."""
    pattern = r"^```python\n(.*?)^```(?:\n+or `stretto (prepare .*?)`)?"
    return re.findall(pattern, page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name == "docs" and snippets(page)], ids=lambda p: p.name
)
def test_the_snippets_of_a_page_run_one_after_the_other(
    page: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_bytes(text_file.read_bytes())
    names: dict[str, object] = {"__name__": "snippet"}
    for code, command in steps(page):
        exec(compile(code, str(page), "exec"), names)
        if command:
            assert main(shlex.split(command.replace("--out data/", "--out command/"))) == 0
            assert_same_files(tmp_path / "command", tmp_path / "data")


def assert_same_files(one: Path, other: Path) -> None:
    for path in one.rglob("*.*"):
        assert path.read_bytes() == (other / path.relative_to(one)).read_bytes()


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page, "toml")], ids=lambda p: p.name)
def test_the_configs_of_a_page_can_be_read(page: Path, tmp_path: Path) -> None:
    for number, text in enumerate(snippets(page, "toml")):
        path = tmp_path / f"{number}.toml"
        # A piece without data is about another section.
        path.write_text(text if "[data]" in text else f'{text}\n[data]\ntrain = "data"\n')
        load_config(path)


def test_readme_shows_the_first_example_as_it_is() -> None:
    (shown,) = snippets(ROOT / "README.md")
    example = (ROOT / "examples" / "01_first_model.py").read_text()
    assert example.endswith(shown)
    assert shown.count("\n") <= 30


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files_that_are_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).is_file(), target


def test_the_config_page_is_made_from_the_config() -> None:
    page = (ROOT / "docs" / "config.md").read_text()
    assert page == config_page(), "run: python tests/config_page.py > docs/config.md"


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert all(f"`stretto {command}" in page for command in COMMANDS)


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(f": {page.name}\n" in navigation for page in (ROOT / "docs").glob("*.md"))
