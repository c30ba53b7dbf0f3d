"""make_engine: builds this rank's engine for a model and a layout."""

from torch import nn

from stretto.base.errors import ConfigError, PlanError
from stretto.blocks.check_widths import check_widths
from stretto.blocks.initialize import check_untied, initialize
from stretto.blocks.losses import Loss
from stretto.blocks.stack import Stack
from stretto.blocks.summary import block_cost
from stretto.blocks.torch_losses import as_loss
from stretto.config.layout import Layout
from stretto.engine.pipeline import PipelineEngine
from stretto.engine.precision import Precision
from stretto.engine.replica import ReplicaEngine
from stretto.mesh.device import find_device
from stretto.mesh.mesh import Mesh
from stretto.mesh.topology import Topology
from stretto.mesh.world import World
from stretto.plan.partition import partition, partition_from_counts


def make_engine(
    model: Stack,
    loss: Loss | nn.Module,
    layout: Layout | None = None,
    world: World | None = None,
    *,
    seed: int | None = None,
    precision: Precision = "fp32",
) -> PipelineEngine | ReplicaEngine:
    """Return the engine that runs this rank's part of `model`; by default there is only one rank.

    With `seed`, each module's weights come from a generator seeded with `seed` and the module's name; `model` can then
    be on the meta device, so no rank ever holds all of it. Without `seed`, all replicas start with replica 0's weights.
    Tied weights are possible only without `seed` and with one stage. `loss` can be one of torch's: see `nn.as_loss`.
    """
    loss = as_loss(loss)
    check_widths(model)
    layout = layout or Layout()
    if layout.auto:
        raise ConfigError(
            "layout.auto has not been resolved; pass the layout from stretto.choose_layout, or use `stretto train`"
        )
    if layout.stages > 1:
        # Check the whole model: each stage would silently train its own copy of a weight that two of them share.
        check_untied(model)
    world = world or World(rank=0, size=1, device=find_device("auto") if model.device.type == "meta" else model.device)
    mesh = Mesh(world, Topology(layout.replicas, layout.stages, layout.adjacent))
    if not model.causal:
        # A block that looks ahead needs the whole window at once, so there is one chunk.
        layout = layout.model_copy(update={"chunks": 1})
    stage = model[stage_parts(model, layout)[mesh.stage]]
    if seed is not None:
        initialize(stage, seed, world.device)
    elif any(parameter.is_meta for parameter in stage.parameters()):
        raise ConfigError("the model's weights are on the meta device; pass seed=... to make_engine to initialize them")
    stage.to(world.device)
    engine = PipelineEngine(stage, loss, layout, mesh, precision=precision, model=model)
    return ReplicaEngine(engine, mesh, has_equal_weights=seed is not None) if layout.replicas > 1 else engine


def stage_parts(model: Stack, layout: Layout) -> list[slice]:
    """Return the slice of blocks that each stage holds: from `layout.blocks`, or else balanced by estimated cost."""
    if layout.blocks:
        if sum(layout.blocks) != len(model):
            raise PlanError(
                f"layout.blocks={list(layout.blocks)} has {sum(layout.blocks)} blocks in total, but the model "
                f"has {len(model)}; make the numbers sum to {len(model)}"
            )
        return partition_from_counts(layout.blocks)
    return partition([block_cost(block) for block in model], layout.stages)
