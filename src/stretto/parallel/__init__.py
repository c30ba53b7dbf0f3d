"""stretto.parallel: ranks share the work of the recurrent layers inside anybody's module."""

from stretto.base.lazy import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
