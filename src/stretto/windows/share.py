"""Share: names the part of each global batch that one replica reads; DividedLanes: the base class of lanes."""

from dataclasses import dataclass, replace
from typing import Self

from stretto.base.errors import DataError


@dataclass(frozen=True)
class Share:
    """Share `index` of `count`; it has at least `min_rows` rows of each batch."""

    index: int
    count: int
    min_rows: int = 1


WHOLE = Share(0, 1)


def take_share(current: Share | None, index: int, count: int, min_rows: int) -> Share:
    """Return share `index` of `count`; raise DataError if the windows are already a share (`current` is not None)."""
    if current is not None:
        # A share of a share would leave rows that no replica trains on.
        raise DataError(
            f"these windows are already share {current.index} of {current.count}; pass the windows without calling "
            "share(): Trainer and evaluate take this replica's share themselves"
        )
    if not 0 <= index < count:
        raise DataError(f"share index={index} of count={count} does not exist; use 0 <= index < count")
    return Share(index, count, min_rows)


class DividedLanes:
    """The base class of `Lanes` and `DocumentLanes`: a fixed global number of lanes, divided among replicas."""

    is_stateful = True  # rows continue from window to window

    lanes: int
    window: int
    own_share: Share | None

    def __post_init__(self) -> None:
        if self.lanes < 1 or self.window < 1:
            raise DataError(f"lanes={self.lanes} and window={self.window} must both be at least 1")

    def share(self, index: int, count: int, min_rows: int = 1) -> Self:
        """Return the lanes of replica `index` of `count`, at least `min_rows`; shares differ by at most one lane."""
        own_share = take_share(self.own_share, index, count, min_rows)
        if count * min_rows > self.lanes:
            problem = f"layout.replicas={count} x layout.micro_batches={min_rows} exceeds data.lanes={self.lanes}"
            raise DataError(f"{problem}; use fewer replicas or micro-batches, or more lanes")
        return replace(self, own_share=own_share)  # type: ignore[type-var]  # subclasses are dataclasses

    @property
    def lane_indices(self) -> range:
        """The global indices of the lanes in this share."""
        share = self.own_share or WHOLE
        return range(self.lanes * share.index // share.count, self.lanes * (share.index + 1) // share.count)
