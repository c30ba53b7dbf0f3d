"""The names that `import stretto` promises."""

import ast
from pathlib import Path

import pytest

import stretto


def test_the_stub_for_type_checkers_lists_the_same_names_from_the_same_homes() -> None:
    stub = ast.parse(Path(stretto.__file__).with_suffix(".pyi").read_text())
    seen = {
        a.name: n.module for n in stub.body if isinstance(n, ast.ImportFrom) for a in n.names if a.name != "testing"
    }
    assert seen == vars(stretto)["_HOME_OF"]


@pytest.mark.parametrize("name", stretto.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    assert getattr(stretto, name) is not None
    assert name in dir(stretto)


def test_the_checks_for_test_suites_are_there_without_an_import_of_their_own() -> None:
    assert callable(stretto.testing.check_chunk_law)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Stackk"):
        stretto.Stackk  # type: ignore[attr-defined]  # noqa: B018
