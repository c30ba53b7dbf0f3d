"""Engines: one step, forward and backward, in any layout."""
