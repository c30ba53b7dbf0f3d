"""Starts ranks, checks the machines that they run on, and writes Kubernetes manifests."""

from stretto.base.lazy import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
