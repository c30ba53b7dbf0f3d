"""Metrics: scores of an evaluation besides its loss, collected where outputs are and combined over all ranks."""
