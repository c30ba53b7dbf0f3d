"""One step forward and backward, in whatever layout."""
