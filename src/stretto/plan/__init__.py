"""Planning a layout: schedules, partitions, costs, a simulator, the search, and profiles measured with torch."""

from stretto.base.lazy import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
