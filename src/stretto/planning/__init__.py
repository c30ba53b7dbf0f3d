"""Choosing a layout: profile, search, compare."""
