"""What users call in their own test suites."""

from stretto.measure.laws import ChunkReport, check_chunk_law

__all__ = ["ChunkReport", "check_chunk_law"]
