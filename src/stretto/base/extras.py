"""Extras: packages that only some commands need, asked for when they do."""

from importlib import import_module
from types import ModuleType

from stretto.base.errors import ConfigError


def import_optional_dependency(package: str, extra: str, feature: str) -> ModuleType:
    """Return a package that is not always there, or say how to get it."""
    try:
        return import_module(package)
    except ImportError:
        raise ConfigError(f"{feature} needs {package.split('.')[0]}; pip install 'stretto[{extra}]'") from None
