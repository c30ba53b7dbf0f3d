"""Words all rooms share: errors, keys and randomness, states, rows and windows."""
