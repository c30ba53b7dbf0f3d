"""Import and export of models and weights: ONNX, torch, Keras."""

from stretto.base.lazy import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
