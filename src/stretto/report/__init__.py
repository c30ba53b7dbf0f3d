"""Reports: HTML pages about runs, and about plans (`stretto plan --html FILE`). They need no network."""

from stretto.base.lazy import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
