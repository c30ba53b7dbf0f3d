"""Inference with a trained model: predict, generate, forecast, stream."""

from stretto.base.lazy import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
