"""FixedLayouts: the choice of a user who gives layouts."""

from collections.abc import Mapping, Sequence
from zlib import crc32

from stretto.base.errors import ConfigError
from stretto.parallel.groups import Group, say, stage_group, whole_group
from stretto.parallel.guard import Call
from stretto.parallel.layers import Inputs, Layers
from stretto.parallel.layout import Layout, Layouts, fit
from stretto.parallel.region import Region


class FixedLayouts:
    """Layouts that the user gives: one for all regions, or those of each region by number of time steps."""

    def __init__(self, layouts: Layout | Mapping[str, Layouts]) -> None:
        self._layouts = layouts

    def layouts(self, region: Region) -> Layouts:
        return {1: self._layouts} if isinstance(self._layouts, Layout) else self._layouts[region.name]

    def bind(self, region: Region) -> Group | None:
        counts = {region.num_ranks(layout) for layout in self.layouts(region).values()} - {1}
        field = "spans" if region.is_bidirectional else "stages"
        if not counts:
            say(f"{region.name}: local, since its layout has one of {field}")
            return None
        group = stage_group(field, max(counts), region.mesh) if len(counts) == 1 else whole_group(region.mesh)
        for count in sorted(counts):
            if len(group.ranks) % count:
                raise ConfigError(
                    f"layout.{field}={count} of {region.name} does not divide the {len(group.ranks)} ranks of a "
                    "node; use a number that does"
                )
            group.messages(count)
        told = "; ".join(
            region.describe(layout) + (f" from {steps} steps on" if steps > 1 else "")
            for steps, layout in sorted(self.layouts(region).items())
        )
        say(f"{region.name}: {told}")
        return group

    def choose(self, region: Region, layers: Layers, inputs: Inputs, group: Group, calls: Sequence[Call]) -> Layout:
        return fit(self.layouts(region), max(call.longest for call in calls))

    def checksum(self, region: Region) -> int:
        return crc32(repr(sorted(self.layouts(region).items())).encode())

    def progress(self) -> tuple[int, int]:
        return 0, 0
