"""Every error in docs/reference/errors.md is made here, for real: it says what the page says that it says."""

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

ERROR_CASES = [mistake for chapter in ERROR_SECTIONS for mistake in chapter.cases]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("furnished")
    make_workspace(folder)
    return folder


@pytest.fixture
def _here(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that a mistake may spoil, as the working directory."""
    monkeypatch.chdir(shutil.copytree(workspace, tmp_path / "here"))


def pattern(says: str) -> str:
    """What is said, where `<...>` may be anything."""
    return "(?s:.+)".join(re.escape(part) for part in re.split("<[^<>]*>", says))


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("mistake", ERROR_CASES, ids=lambda mistake: mistake.message[:50])
def test_the_mistake_is_answered_as_the_page_says(mistake: ErrorCase, capsys: pytest.CaptureFixture[str]) -> None:
    if isinstance(mistake.trigger, str):
        assert main(shlex.split(mistake.trigger)[1:]) == mistake.error.exit_code
        (said,) = capsys.readouterr().err.splitlines()
        assert re.fullmatch(f"stretto: error: {pattern(mistake.message)}", said), said
        return
    with pytest.raises(StrettoError) as caught:
        mistake.trigger()
    assert re.fullmatch(pattern(mistake.message), str(caught.value)), str(caught.value)
    assert isinstance(caught.value, mistake.error)
    assert caught.value.exit_code == mistake.error.exit_code


def test_no_two_mistakes_are_answered_alike() -> None:
    assert len({mistake.message for mistake in ERROR_CASES}) == len(ERROR_CASES) >= 60


def test_the_errors_page_is_made_from_the_mistakes() -> None:
    page = Path(__file__).parents[1] / "docs" / "reference" / "errors.md"
    assert page.read_text() == errors_page(), "run: python tests/errors_page.py > docs/reference/errors.md"
