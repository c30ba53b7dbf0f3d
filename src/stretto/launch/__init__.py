"""Starts ranks on this machine, and checks the machines that ranks run on."""

from stretto.base.lazy import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
