"""What the place of a replica's ranks means: the link to the next stage or span, and the speed on shared cores."""

from stretto.config.layout import Layout
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.profile import Link
from stretto.plan.simulator import SpeedFunction


def link_after(costs: CostModel, cluster: Cluster, layout: Layout, column: int) -> Link:
    """Return the link from a stage or span to the next one, or from the last one to the first."""
    return costs.inter_node if cluster.crosses_nodes(layout, column) else costs.intra_node


def shared_speed(costs: CostModel, cluster: Cluster, layout: Layout) -> SpeedFunction:
    """Return the speed of each stage or span of a replica that computes, given how many of them do."""
    num_on_node = cluster.ranks_on_node(layout)
    # Assume that all replicas on a node run the same actions at the same time.
    replicas_on_node = max(1, num_on_node // (layout.stages * layout.spans))
    return lambda num_busy: costs.contention.relative_speed(num_on_node, num_busy=num_busy * replicas_on_node)
