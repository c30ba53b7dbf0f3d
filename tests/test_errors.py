"""Every error in docs/reference/errors.md is triggered here, and has the message that the page shows."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from errors_page import errors_page
from helpers.error_catalog import ERROR_SECTIONS, ErrorCase
from helpers.error_triggers import make_workspace
from stretto import StrettoError
from stretto.cli.main import main

ERROR_CASES = [case for section in ERROR_SECTIONS for case in section.cases]

LONG = (pytest.mark.long, pytest.mark.short)  # left out by plain `pytest`, but not by CI


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    make_workspace(folder)
    return folder


@pytest.fixture
def _here(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that an error may spoil, as the working directory."""
    monkeypatch.chdir(shutil.copytree(workspace, tmp_path / "here"))


def pattern(message: str) -> str:
    """A regular expression for a message, where `<...>` may be anything; a lost rank may never have been seen."""
    known = message.replace("<last seen>", "\0")
    return "(?s:.+)".join(re.escape(part) for part in re.split("<[^<>]*>", known)).replace(re.escape("\0"), "(?s:.*)")


def marks_of(case: ErrorCase) -> tuple[pytest.MarkDecorator, ...]:
    """Errors about lost ranks start some; CI has the one about a killed rank in test_lost_rank.py."""
    if case.message.startswith("rank <n> was killed"):
        return (pytest.mark.long,)
    return LONG if case.message.startswith("rank <n>") else ()


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=marks_of(case)) for case in ERROR_CASES],
    ids=lambda case: case.message[:50],
)
def test_each_error_has_the_message_on_the_page(case: ErrorCase, capsys: pytest.CaptureFixture[str]) -> None:
    if isinstance(case.trigger, str):
        assert main(shlex.split(case.trigger)[1:]) == case.error.exit_code
        (line,) = capsys.readouterr().err.splitlines()
        assert re.fullmatch(f"stretto: error: {pattern(case.message)}", line), line
        return
    with pytest.raises(StrettoError) as caught:
        case.trigger()
    assert re.fullmatch(pattern(case.message), str(caught.value)), str(caught.value)
    assert isinstance(caught.value, case.error)
    assert caught.value.exit_code == case.error.exit_code


def test_no_two_errors_have_the_same_message() -> None:
    assert len({case.message for case in ERROR_CASES}) == len(ERROR_CASES) >= 60


def test_the_errors_page_is_up_to_date() -> None:
    page = Path(__file__).parents[1] / "docs" / "reference" / "errors.md"
    assert page.read_text() == errors_page(), "run: python tests/errors_page.py > docs/reference/errors.md"
