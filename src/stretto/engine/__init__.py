"""Engines: they run the forward and backward of a training step, in any layout."""
