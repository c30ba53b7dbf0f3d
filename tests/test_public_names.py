"""The names that stretto promises: few at the top, the rest by namespace, each importable and lazy."""

from importlib import import_module

import pytest

import stretto

NAMESPACES = ["stretto", *(f"stretto.{name}" for name in stretto.__all__ if name.islower() and "_" not in name)]
NAMESPACES = [
    name
    for name in NAMESPACES
    if name not in ("stretto.evaluate", "stretto.parallelize", "stretto.spawn", "stretto.verify", "stretto.world")
]


def test_there_are_at_most_38_names_at_the_top_level() -> None:
    assert len(stretto.__all__) <= 38


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_public_name_can_be_imported_and_is_listed(namespace: str) -> None:
    module = import_module(namespace)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)


def test_a_name_is_public_in_one_namespace_only() -> None:
    # Regions take Layout, Stack and verify over from the engine, which goes with the issue "One way to train".
    # StrettoError is at the top too, so that `except stretto.StrettoError` needs no second import.
    names = [name for namespace in NAMESPACES for name in import_module(namespace).__all__]
    assert {name for name in names if names.count(name) > 1} == {"Layout", "Stack", "StrettoError", "verify"}


def test_a_name_imported_from_a_namespace_is_not_shadowed_by_a_module_of_its_package() -> None:
    for namespace in NAMESPACES[1:]:
        module = import_module(namespace)
        for name in module.__all__:
            with pytest.raises(ModuleNotFoundError):
                import_module(f"{namespace}.{name}")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Stackk"):
        stretto.Stackk  # type: ignore[attr-defined]  # noqa: B018
