"""Imports the user's own code that a config names: `file.py:name` or `package.module:name`."""

import importlib
import importlib.util
import sys
from itertools import count
from pathlib import Path
from types import ModuleType

from stretto.base.errors import ConfigError
from stretto.base.reason import short_reason
from stretto.config.effects import used_code
from stretto.config.run import RunConfig


def load_object(field: str, spec: str) -> object:
    """Import and return the object that is named by `spec`, the value of a config's `field`.

    The path of a file is relative to the current folder. A module is imported as usual: from the installed packages
    and PYTHONPATH. The `stretto` command does not search the current folder, nor the folder of the file.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise ConfigError(f"{field}={spec!r} does not name an object; write it as file.py:name or package.module:name")
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except ModuleNotFoundError as error:
        remedy = "install it, or add its folder to PYTHONPATH"
        raise ConfigError(
            f"{field}={spec!r} needs a module that is not installed ({short_reason(error)}); {remedy}"
        ) from None
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(
            f"{field}={spec!r} can't be imported ({short_reason(error)}); fix it, or choose a different one"
        ) from None
    if not hasattr(module, name):
        raise ConfigError(f"{field}={spec!r}: {source} has no {name}; use a name that it defines")
    value: object = getattr(module, name)
    return value


def check_trusted(
    config: RunConfig, location: str, trust: bool, *, opens_data: bool = False, evaluates: bool = False
) -> RunConfig:
    """Return the config; raise if it names Python code and the caller does not trust it.

    `data.factory` counts only if the caller opens the data, and `metrics.names` only if it evaluates.
    """
    is_run = {"data.factory": opens_data, "metrics.names": evaluates}
    for name, value in used_code(config):
        if is_run.get(name, True) and not trust:
            raise ConfigError(
                f"loading {location} would run Python code ({name}={value!r}); set trust=True if you trust its author"
            )
    return config


def _load_file(path: Path) -> ModuleType:
    """Execute a file as a new module."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    # A name of our own: a file such as `json.py` must not replace another module.
    names = (f"_stretto_user_code_{number}_{path.stem}" for number in count())
    module_name = next(name for name in names if name not in sys.modules)
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    # Before it is executed, as the import system does: `dataclass` looks up the module of a class there.
    sys.modules[module_name] = module
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
