"""Training: reports, requests, experiment trackers and traces, for use with `stretto.Trainer` and `stretto.Run`."""

from stretto.base.lazy import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
