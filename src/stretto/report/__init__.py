"""Pictures: pages that open from disk, with no network and nothing to install."""

from stretto.base.lazy import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
