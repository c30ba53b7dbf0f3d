"""RandomSplit: which sequences are for validation."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class RandomSplit:
    """Draws a fraction of the sequences for validation: a pure function of the seed, the part and the row."""

    validation_fraction: float
    seed: int

    @property
    def names(self) -> tuple[str, ...]:
        return ("train", "valid") if self.validation_fraction else ("",)

    def choose(self, part: int, row: int) -> str:
        """Return the split of a sequence, the same in all phases."""
        if not self.validation_fraction:
            return ""
        digest = hashlib.blake2b(f"{self.seed} {part} {row}".encode(), digest_size=8).digest()
        return "valid" if int.from_bytes(digest, "big") < self.validation_fraction * 2**64 else "train"
