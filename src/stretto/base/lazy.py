"""Lazy exports, as in the package lazy_loader: public names, listed once in a stub and imported on first use."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

Exports = tuple[list[str], Callable[[str], object], Callable[[], list[str]]]  # __all__, __getattr__ and __dir__


def lazy_exports(module: str, file: str) -> Exports:
    """Return `__all__`, `__getattr__` and `__dir__` for a module, from the imports in the `.pyi` file beside it."""
    module_of: dict[str, str] = {}  # public name -> the module that defines it
    for node in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module_of |= dict.fromkeys((alias.name for alias in node.names), node.module)

    def get_attribute(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        # `from stretto import nn` in the stub of stretto names a submodule. Every other import names an attribute.
        is_submodule = module_of[name] == module
        value = import_module(f"{module}.{name}") if is_submodule else getattr(import_module(module_of[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[module]), *module_of})

    return sorted(module_of), get_attribute, list_names
