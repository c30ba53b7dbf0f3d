"""Lazy exports: a package's public names, listed once in its stub, imported when they are first used."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

# As torch and the scientific Python packages do it: type checkers read the stub, and so do we.
Exports = tuple[list[str], Callable[[str], object], Callable[[], list[str]]]


def lazy_exports(module: str, file: str) -> Exports:
    """Return `__all__`, `__getattr__` and `__dir__` for a module, from the imports in the `.pyi` file beside it."""
    homes: dict[str, str] = {}
    for node in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            homes |= dict.fromkeys((alias.name for alias in node.names), node.module)

    def get_attribute(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        # `from stretto import nn` in a stub is a submodule; all else is a name in a module.
        is_submodule = homes[name] == module
        value = import_module(f"{module}.{name}") if is_submodule else getattr(import_module(homes[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[module]), *homes})

    return sorted(homes), get_attribute, list_names
