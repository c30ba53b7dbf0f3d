"""Checks for your own test suite: the chunk law of a block, the layout law of a model."""

from stretto.base.lazy import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
