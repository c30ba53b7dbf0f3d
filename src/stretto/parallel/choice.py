"""Choice: which layout each call of a region gets. The ranks of a group choose from the same facts, so they agree."""

from collections.abc import Mapping, Sequence

from torch import nn

from stretto.base.errors import ConfigError
from stretto.parallel.groups import Group, say, stage_group, whole_group
from stretto.parallel.guard import Call
from stretto.parallel.inputs import Inputs
from stretto.parallel.layout import Layout, Layouts, fit
from stretto.parallel.region import Region


class FixedLayouts:
    """Layouts that the user gives: one for all regions, or those of each region by number of time steps."""

    def __init__(self, layouts: Layout | Mapping[str, Layouts]) -> None:
        self._layouts = layouts

    def layouts(self, region: Region) -> Layouts:
        return {1: self._layouts} if isinstance(self._layouts, Layout) else self._layouts[region.name]

    def bind(self, region: Region) -> Group | None:
        stages = {layout.num_stages for layout in self.layouts(region).values()} - {1}
        if not stages:
            return None
        group = stage_group(max(stages), region.mesh) if len(stages) == 1 else whole_group(region.mesh)
        for num_stages in sorted(stages):
            if len(group.ranks) % num_stages:
                raise ConfigError(
                    f"layout.stages={num_stages} of {region.name} does not divide the {len(group.ranks)} ranks of a "
                    "node; use layouts of as many ranks"
                )
            group.messages(num_stages)
        told = "; ".join(
            f"{layout}" + (f" from {steps} steps on" if steps > 1 else "")
            for steps, layout in sorted(self.layouts(region).items())
        )
        say(f"{region.name}: {told}")
        return group

    def choose(self, region: Region, rnn: nn.RNNBase, inputs: Inputs, group: Group, calls: Sequence[Call]) -> Layout:
        return fit(self.layouts(region), max(call.longest for call in calls))

    def progress(self) -> tuple[int, int]:
        return 0, 0
