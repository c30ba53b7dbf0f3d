"""Share: which rows of each global batch belong to one replica."""

from dataclasses import dataclass

from stretto.base.errors import DataError


@dataclass(frozen=True)
class Share:
    """Part `index` of `count`, with at least `min_rows` rows."""

    index: int
    count: int
    min_rows: int = 1

    def lane_indices(self, num_lanes: int) -> range:
        """Return the global indices of this share's lanes; the sizes of two shares differ by at most one lane."""
        return range(num_lanes * self.index // self.count, num_lanes * (self.index + 1) // self.count)


WHOLE = Share(0, 1)


def take_share(taken: Share | None, index: int, count: int, min_rows: int) -> Share:
    """Return a share of windows of which `taken` is the share so far: None, or there is nothing left to divide."""
    if taken is not None:
        # A share of a share would leave rows that no replica trains on.
        raise DataError(
            f"these windows are already share {taken.index} of {taken.count}; pass the windows without calling "
            "share(): Trainer and evaluate take this replica's share themselves"
        )
    if not 0 <= index < count:
        raise DataError(f"index={index} is out of range for count={count} shares; use 0 to {count - 1}")
    return Share(index, count, min_rows)


def take_lanes_share(taken: Share | None, num_lanes: int, index: int, count: int, min_rows: int) -> Share:
    """Return a share of lanes; raise if some share would have fewer than `min_rows` of them."""
    share = take_share(taken, index, count, min_rows)
    if count * min_rows > num_lanes:
        raise DataError(
            f"layout.replicas={count} x layout.micro_batches={min_rows} exceeds data.lanes={num_lanes}; use at most "
            "one per lane"
        )
    return share
