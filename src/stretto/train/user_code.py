"""Imports the user's own code that a config names: `file.py:name` or `package.module:name`."""

import importlib
import importlib.util
from pathlib import Path

from stretto.base.errors import ConfigError


def load_object(field: str, spec: str) -> object:
    """Import and return the object that is named by `spec`, the value of a config's `field`."""
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise ConfigError(f"{field}={spec!r} does not name an object; write it as file.py:name or package.module:name")
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(f"{field}={spec!r} can't be imported ({error}); fix it, or choose a different one") from None
    if not hasattr(module, name):
        raise ConfigError(f"{field}={spec!r}: {source} has no {name}; use a name that it defines")
    value: object = getattr(module, name)
    return value


def _load_file(path: Path) -> object:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module
