"""Checks for your own tests: chunks must not change a block's results, and the layout must not change a model's."""

from stretto.base.lazy import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
