"""Training: the trainer, evaluation, and runs from a config with their log and checkpoints."""

from stretto.base.lazy import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
