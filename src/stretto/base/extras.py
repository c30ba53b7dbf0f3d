"""Optional dependencies, imported when a feature needs them."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from stretto.base.errors import ConfigError


def import_optional_dependency(package: str, extra: str, feature: str) -> ModuleType:
    """Import an optional package, or raise an error that says how to install it."""
    try:
        return import_module(package)
    except ImportError:
        raise ConfigError(f"{feature} needs {package.split('.')[0]}; {install_command(extra)}") from None


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it (only the packages that it is in)."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # the package that it is in
        return False
    # A folder of that name in the working directory is found too, but has no origin.
    return spec is not None and spec.origin is not None


def install_command(extra: str) -> str:
    """Return the command that installs an extra of stretto; it differs if stretto was installed from a clone."""
    return f"pip install 'stretto[{extra}]' (in a clone: pip install -e '.[{extra}]')"
