"""Checks and profiles: whether blocks keep the laws, and what they cost."""
