"""make_engine: builds this rank's engine for a model and a layout."""

from torch import nn

from stretto.base.errors import ConfigError, PlanError
from stretto.base.freed_memory import keep_freed_memory
from stretto.blocks.block import Block
from stretto.blocks.check_widths import check_widths
from stretto.blocks.initialize import draw_block, initialize
from stretto.blocks.loss_weights import attach_loss
from stretto.blocks.losses import Loss
from stretto.blocks.pointwise import Embedding
from stretto.blocks.row_loss import RowLoss
from stretto.blocks.span_program import SpanProgram, explain_waiting
from stretto.blocks.stack import Stack
from stretto.blocks.summary import block_costs
from stretto.blocks.ties import restore_ties
from stretto.blocks.torch_losses import as_loss
from stretto.blocks.vocab_check import check_vocab_parallel, has_tied_table
from stretto.blocks.vocab_embedding import EmbeddingShard
from stretto.blocks.vocab_shard import VocabShard, shard_rows
from stretto.config.layout import Layout
from stretto.engine.pipeline import PipelineEngine
from stretto.engine.precision import Precision
from stretto.engine.replica import ReplicaEngine
from stretto.engine.spans import SpanEngine
from stretto.engine.stage_run import StageRun
from stretto.engine.tied_weights import TiedWeights, find_holders
from stretto.engine.vocab_head import VocabHead
from stretto.mesh.device import find_device
from stretto.mesh.mesh import Mesh
from stretto.mesh.topology import Topology
from stretto.mesh.world import World
from stretto.plan.partition import (
    check_block_counts,
    interleaved_partition,
    look_ahead_share,
    partition,
    partition_from_counts,
)
from stretto.plan.run_chain import cut_at_look_ahead


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
    Weights that blocks of several stages share (tied weights) stay equal. `loss` can be one of torch's: `nn.as_loss`.
    Weights of the loss are those of the last stage, named `loss.<name>`. On a CPU, the process keeps memory it frees.
    """
    loss, layout = as_loss(loss), layout or Layout()
    _check_model_and_layout(model, layout)
    check_widths(model, loss)
    given_model, model = model, attach_loss(model, loss)
    head_loss = check_vocab_parallel(model, loss, layout.stages) if layout.splits_vocab else None
    parts = stage_parts(model, layout)
    if head_loss is not None:
        parts[-1] = slice(parts[-1].start, len(model) - 1)  # all stages have some rows of the last block
    holders = find_holders(model, parts, layout.stages)
    world = _prepare_world(world, model)
    all_stages = tuple(range(layout.stages))
    shared_by = [*holders.values(), *([] if head_loss is None else [all_stages])]
    mesh = _make_mesh(world, layout, loss, shared_by)
    layout = layout.effective(is_causal=model.causal)
    # Without a seed, weights that were split before stay so.
    given_model.is_split = model.is_split = layout.stages > 1 or (seed is None and given_model.is_split)
    stage, tied_names = model.join(parts[mesh.stage :: layout.stages]), model.tied_names()
    splits_embedding = head_loss is not None and has_tied_table(model)
    if splits_embedding and mesh.is_first_stage:
        stage.split_embedding()
    if seed is not None:
        initialize(stage, seed, world.device, model=model)
        restore_ties(model, tied_names, stage)
    elif any(parameter.is_meta for parameter in stage.parameters()):
        raise ConfigError("the model's weights are on the meta device; pass seed=... to make_engine to initialize them")
    if head_loss is not None:
        head, embedding = add_vocab_shards(stage, model, mesh, seed, is_tied=splits_embedding)
    stage.to(world.device)
    tied_groups = {name: mesh.stage_groups[stages] for name, stages in holders.items() if mesh.stage in stages}
    tied_weights = TiedWeights(stage, tied_groups)
    if seed is None:
        tied_weights.copy_from_first_stage()
    if layout.spans > 1:
        span_engine = SpanEngine(stage, loss, layout, mesh, precision=precision)
        return ReplicaEngine(span_engine, mesh, has_equal_weights=seed is not None)
    runs = None if head_loss is not None else _make_stage_runs(stage, model, layout, parts, mesh.stage)
    engine = PipelineEngine(stage, loss, layout, mesh, precision=precision, model=model, runs=runs)
    engine.tied_weights = tied_weights
    if head_loss is not None:
        engine.vocab_head = VocabHead(head, head_loss, mesh, mesh.stage_groups[all_stages], precision, embedding)
    return ReplicaEngine(engine, mesh, has_equal_weights=seed is not None) if layout.replicas > 1 else engine


def _prepare_world(world: World | None, model: Stack) -> World:
    """Return the world, by default one rank on the model's device; on a CPU, keep the memory that steps free."""
    world = world or World(rank=0, size=1, device=find_device("auto") if model.device.type == "meta" else model.device)
    keep_freed_memory(world.device)
    return world


def _make_mesh(world: World, layout: Layout, loss: Loss, shared_by: list[tuple[int, ...]]) -> Mesh:
    """Return the mesh of a layout; `shared_by` has the sets of stages that hold copies of the same weights."""
    if layout.spans > 1 and isinstance(loss, RowLoss):
        shared_by = [*shared_by, tuple(range(layout.spans))]  # the spans gather the outputs of whole rows
    topology = Topology(layout.replicas, layout.stages, layout.adjacent, layout.spans)
    return Mesh(world, topology, shared_by, is_ring=layout.is_interleaved)


def _make_stage_runs(stack: Stack, model: Stack, layout: Layout, parts: list[slice], stage: int) -> list[StageRun]:
    """Return the runs of a stage; those of blocks that look ahead are whole, if the layout has several chunks."""
    looks_ahead = [layout.chunks > 1 and not block.causal for block in model]
    chain, run_parts = cut_at_look_ahead(parts, looks_ahead, layout.stages)
    numbers = chain.runs_of_stage[stage]
    stacks = [stack] if len(numbers) == 1 else [model[run_parts[number]] for number in numbers]
    return [StageRun(*pair, chain=chain, model=model) for pair in zip(stacks, numbers, strict=True)]


def _check_model_and_layout(model: object, layout: Layout) -> None:
    if not isinstance(model, Stack):
        raise ConfigError(
            f"model is of type {type(model).__name__}, not a stretto.nn.Stack; train it as it is with "
            "stretto.parallelize(model) and DistributedDataParallel, or build a Stack from blocks"
        )
    if layout.auto:
        raise ConfigError(
            "layout.auto has not been resolved; pass the layout from stretto.choose_layout, or use `stretto train`"
        )
    if layout.spans > 1:
        check_spans(model, layout)


def check_spans(model: Stack, layout: Layout) -> None:
    """Raise if the model can't be split over spans."""
    program = SpanProgram.of(model)  # raises if a block can't be split
    if model.causal and not program.is_affine:
        waiting = explain_waiting(model) or "all blocks of this one wait for the state before them"
        raise ConfigError(
            f"layout.spans={layout.spans} is for models that look ahead in time or have affine blocks, such as MinGRU, "
            f"but {waiting}; use layout.stages with layout.chunks"
        )


def add_vocab_shards(
    stage: Stack, model: Stack, mesh: Mesh, seed: int | None, *, is_tied: bool
) -> tuple[VocabShard, EmbeddingShard | None]:
    """Give a stage its rows of the last block's table, and return them; whole tables exist only while they are drawn.

    If the table is that of the embedding too, the second result has the same rows.
    """

    def block_at(index: int) -> Block:
        return model[index] if seed is None else draw_block(model, index, seed)

    last, embedding = len(model) - 1, None
    head_block = block_at(last)
    assert head_block.num_table_rows is not None
    rows = shard_rows(head_block.num_table_rows, mesh.stage, mesh.num_stages)
    head = VocabShard(head_block, rows)
    if is_tied:
        block = block_at(0)
        assert isinstance(block, Embedding)
        embedding = EmbeddingShard(block, rows)
        head.module.weight = embedding.weight
        stage.add_shard(model.first, embedding)  # first, because the weight's first name is the embedding's
    stage.add_shard(model.first + last, head)
    return head, embedding


def stage_parts(model: Stack, layout: Layout) -> list[slice]:
    """Return the slice of blocks that each stage holds: from `layout.blocks`, or else balanced by estimated cost.

    With `layout.interleave`, stages hold several slices each: slice i is that of stage i mod `layout.stages`.
    """
    if layout.is_interleaved and not model.causal:
        index, block = next((index, block) for index, block in enumerate(model, model.first) if not block.causal)
        raise PlanError(
            f"layout.interleave={layout.interleave} needs causal blocks, but block {index} ({type(block).__name__}) "
            "looks ahead in time; leave it out"
        )
    if layout.blocks:
        check_block_counts(layout, len(model))
        return partition_from_counts(layout.blocks)
    costs = block_costs(model)
    if layout.is_interleaved:
        return interleaved_partition(costs, layout.stages, layout.interleave)
    if layout.chunks > 1 and not layout.splits_vocab:
        costs = [
            cost if block.causal else cost * look_ahead_share(layout.micro_batches)
            for cost, block in zip(costs, model, strict=True)
        ]
    if not layout.splits_vocab:
        return partition(costs, layout.stages)
    # All stages share the last block's work; it is listed with the last stage.
    parts = partition(costs[:-1], layout.stages)
    return [*parts[:-1], slice(parts[-1].start, len(costs))]
