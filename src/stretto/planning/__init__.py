"""Chooses a layout: obtains a profile, usually measured with `measure/`, and searches for the fastest with `plan/`."""
