"""Checks for your own tests: a block gives equal results in chunks (chunk law), a model in any layout (layout law)."""

from stretto.base.lazy import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
