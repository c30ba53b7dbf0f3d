"""Shared values: errors, positional randomness, state helpers, windows."""
