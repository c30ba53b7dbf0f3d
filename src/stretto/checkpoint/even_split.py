"""EvenSplit: divides bytes that several ranks hold among these ranks, to write or read each byte once."""

from dataclasses import dataclass

_MIN_SHARE_BYTES = 1 << 20  # thousands of ranks must not cut a small model into tiny pieces


@dataclass(frozen=True)
class EvenSplit:
    """`num_bytes` in a line, divided into equal shares for `count` ranks; into fewer shares if they would be tiny.

        3 shares for 8 ranks       |--- rank 0 ---|--- rank 2 ---|--- rank 5 ---|

    The ranks with a share are far apart, so that as many nodes as possible take part.
    """

    num_bytes: int
    count: int

    @property
    def num_shares(self) -> int:
        return min(self.count, max(1, self.num_bytes // _MIN_SHARE_BYTES))

    def share(self, index: int) -> range:
        """Return the bytes of rank `index`; an empty range if it has none."""
        number = -(-index * self.num_shares // self.count)  # of the first share at this rank or later
        if number * self.count // self.num_shares != index:
            return range(0)
        return range(self._start(number), self._start(number + 1))

    def owner(self, position: int) -> int:
        """Return the rank whose share has the byte at this position."""
        number = position * self.num_shares // max(self.num_bytes, 1)
        # A share starts at a whole byte, which may be just before its exact start.
        number += position >= self._start(number + 1)
        return number * self.count // self.num_shares

    def _start(self, number: int) -> int:
        return number * self.num_bytes // self.num_shares
