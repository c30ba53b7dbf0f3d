"""What users call in their own test suites."""

from stretto.measure.laws import ChunkReport, check_chunk_law, check_loss
from stretto.measure.verify import Verification, verify

__all__ = ["ChunkReport", "Verification", "check_chunk_law", "check_loss", "verify"]
