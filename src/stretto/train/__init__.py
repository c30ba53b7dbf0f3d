"""Training: the trainer, evaluation, and runs, which follow a config and have a log and checkpoints."""

from stretto.base.lazy import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
