"""Choosing a layout: obtain a profile, then search for the layout with the lowest predicted step time."""
