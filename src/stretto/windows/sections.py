"""Sections: into how many equal sections an epoch's data is cut, and which rows of their parts a replica reads.

4 sections, 8 replicas             4 sections, 3 replicas: 3 slots per section, 4 slots per replica
section   0    1    2    3         section   0      1      2      3
replica  0 1  2 3  4 5  6 7        slot     0 1 2  0 1 2  0 1 2  0 1 2
                                   replica  0 0 0  0 1 1  1 1 2  2 2 2
"""

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np

from stretto.store.sequences import IntArray

# As many sections as a large cluster has nodes; a power of two, so that most numbers of nodes divide it.
_MAX_SECTIONS = 512
# A node reads a page too much where a section starts or ends, in each of up to four files.
_MIN_SECTION_BYTES = 32 << 20
# An epoch has at least this many batches. With less, the parts of sections could not be filled well.
_MIN_BATCHES = 64


def count_sections(num_bytes: int, num_batches: float, max_sections: int) -> int:
    """Return the number of sections for data of `num_bytes`, in about `num_batches` batches: a power of two."""
    sections = 1
    while (
        2 * sections <= min(_MAX_SECTIONS, max_sections)
        and num_batches >= _MIN_BATCHES
        and num_bytes >= 2 * sections * _MIN_SECTION_BYTES
    ):
        sections *= 2
    return sections


class SectionShare(NamedTuple):
    """The slots of a section that belong to one replica: `slots` of `num_slots`, each with equally many rows."""

    section: int
    slots: range
    num_slots: int

    def rows(self, num_rows: int) -> IntArray:
        """Return which of the section's rows in a batch (longest first) are in these slots, in ascending order.

            rows     0  1  2  3 | 4  5  6  7 | 8  9
            slot     0  1  2  3 | 3  2  1  0 | 0  1

        The direction alternates, so that all slots get nearly the same number of time steps.
        """
        if len(self.slots) == self.num_slots:
            return np.arange(num_rows)
        # Neighboring slots, which often belong to one replica, are not neighbors in this order.
        places = (np.array(self.slots) * _distant_factor(self.num_slots)) % self.num_slots
        rounds = np.arange(-(-num_rows // self.num_slots))[:, None]
        rows = np.sort((rounds * self.num_slots + np.where(rounds % 2, self.num_slots - 1 - places, places)).ravel())
        return rows[rows < num_rows]


def _distant_factor(num_slots: int) -> int:
    """Return a factor without common divisors with `num_slots`: multiples of it are far apart (golden ratio)."""
    factor = max(1, round(num_slots * 0.618))
    while gcd(factor, num_slots) > 1:
        factor -= 1
    return factor


@dataclass(frozen=True)
class Division:
    """The sections of the data, divided among `count` replicas."""

    num_sections: int
    count: int

    def share(self, index: int) -> list[SectionShare]:
        """Return what replica `index` reads: whole sections, or slots of at most two more."""
        divisor = gcd(self.num_sections, self.count)
        num_slots, per_replica = self.count // divisor, self.num_sections // divisor
        start, stop = index * per_replica, (index + 1) * per_replica
        return [
            SectionShare(
                section,
                range(max(start - section * num_slots, 0), min(stop - section * num_slots, num_slots)),
                num_slots,
            )
            for section in range(start // num_slots, -(-stop // num_slots))
        ]
