"""Sinks: experiment trackers that get the lines of a run's log, one module for each."""
