"""Optional dependencies, imported when a feature needs them."""

from importlib import import_module
from types import ModuleType

from stretto.base.errors import ConfigError


def import_optional_dependency(package: str, extra: str, feature: str) -> ModuleType:
    """Import an optional package, or raise an error that says how to install it."""
    try:
        return import_module(package)
    except ImportError:
        raise ConfigError(f"{feature} needs {package.split('.')[0]}; {install_command(extra)}") from None


def install_command(extra: str) -> str:
    """Return the command that installs an extra of stretto; it differs if stretto was installed from a clone."""
    return f"pip install 'stretto[{extra}]' (in a clone: pip install -e '.[{extra}]')"
