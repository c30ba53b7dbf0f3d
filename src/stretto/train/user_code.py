"""What a config names of the user's own code: `file.py:name` or `package.module:name`."""

import importlib
import importlib.util
from pathlib import Path

from stretto.base.errors import ConfigError


def load_object(field: str, spec: str) -> object:
    """Return the object that a config's field names."""
    place, _, name = spec.rpartition(":")
    if not place:
        raise ConfigError(f"{field}={spec!r} names no object; write it as file.py:name or package.module:name")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(
            f"{field}={spec!r} can't be imported ({error}); give a file or module that is there"
        ) from None
    if not hasattr(module, name):
        raise ConfigError(f"{field}={spec!r}: {place} has no {name}; name something that it defines")
    found: object = getattr(module, name)
    return found


def _load_file(path: Path) -> object:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
