"""The errors that stretto raises, for example for an invalid config or a lost rank."""

from stretto.base.lazy import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
