"""Choosing a layout: obtain a profile, then compare the predicted step times of layouts."""
