"""Checkpoints: saved by all ranks in the background, read by any number of ranks in any layout."""

from stretto.base.lazy import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
