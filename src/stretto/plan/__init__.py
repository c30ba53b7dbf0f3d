"""Pure planning, without torch: actions, orders, partition, simulation, costs, search."""

from stretto.base.lazy import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
