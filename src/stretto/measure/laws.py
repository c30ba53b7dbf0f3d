"""Checks of blocks and losses: splitting an input in time or in rows must not change what they compute."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from stretto.base.errors import LawError
from stretto.base.reason import short_reason
from stretto.base.state import State, cat_rows, detach
from stretto.base.tf32 import use_tf32
from stretto.base.window import Rows
from stretto.blocks.affine import AffineBlock, has_own_forward
from stretto.blocks.block import Block
from stretto.blocks.losses import Loss, LossSum
from stretto.blocks.row_loss import RowLoss, call_row_loss
from stretto.blocks.torch_losses import as_loss


@dataclass(frozen=True)
class ChunkReport:
    """How many ways of running the block were compared, and the largest relative difference in each kind of result."""

    num_variants: int
    outputs: float
    state: float
    gradients: float


@dataclass(frozen=True)
class _Variant:
    """A way to run a block that must give the same result as one call on the whole input."""

    description: str
    cuts: Sequence[int]  # the first time step of each chunk after the first
    row_slices: Sequence[slice]  # one per micro-batch
    advice: str  # the remedy if the result differs
    is_stateful: bool = False  # each chunk is a separate window, and the state is carried to the next
    is_affine: bool = False  # each chunk runs without knowing its state, which comes from the maps of those before it


_Result = dict[str, dict[str, Tensor]]
"""The `outputs`, final `state` and `gradients` of one run of a block, each as tensors by name."""


@use_tf32(False)
def check_chunk_law(
    block: Block,
    x: Tensor,
    *,
    cuts: Iterable[Sequence[int]] | None = None,
    tolerance: float | None = None,
    key: int = 0,
) -> ChunkReport:
    """Check that a block satisfies the chunk law on `x` (`[time, batch, ...]`); raise a `LawError` if it doesn't.

    The block runs on the whole input, and then in other ways: on the whole input again; cut before the time steps
    listed in each of `cuts` (default: before each time step in turn, then before all; if the block has a stride, before
    its multiples only); in windows that carry state, cut as in the last of `cuts`; and on two halves of the rows, whose
    chunks alternate as those of micro-batches do in a pipeline. An `AffineBlock` also runs in parts that are combined
    by their maps. Outputs, final state and gradients (of parameters,
    input and initial state) must agree within the relative `tolerance` (default: 1e-12 in float64, else 1e-4, because
    of rounding). The block keeps its dtype and mode: `block.double()` with a float64 `x` is the most sensitive check.
    `key` seeds dropout. On CUDA, TF32 is off during the check, and for a block in eval mode cuDNN too, because its RNNs
    have no backward there.
    """
    name = type(block).__name__
    if not isinstance(block, Block):
        raise LawError(f"{name} is not a stretto.nn.Block; subclass Block, so that it has an initial state")
    if not block.causal:
        raise LawError(
            f"{name} declares causal=False: it looks ahead, so it is never split in time; check a causal block"
        )
    if tolerance is None:
        tolerance = 1e-12 if _dtype(block, x) == torch.float64 else 1e-4
    num_steps, num_rows = x.shape[:2]
    if num_steps <= block.stride or num_rows < 2:
        raise LawError(f"x has shape {list(x.shape)}; use at least {block.stride + 1} time steps and 2 rows")
    whole = _run(block, x, _Variant("run on the whole input", [], [slice(0, num_rows)], ""), key)
    _check_shapes(block, whole, x, key)
    worst = dict.fromkeys(whole, 0.0)
    variants = _variants(block, num_steps, num_rows, cuts)
    for variant in variants:
        prefix = f"{name} breaks the chunk law: when {variant.description},"
        try:
            result = _run(block, x, variant, key)
        except (RuntimeError, TypeError) as error:
            raise LawError(f"{prefix} it fails ({short_reason(error)}); {variant.advice}") from error
        for part in worst:
            tensor_name, difference = _compare(whole[part], result[part])
            worst[part] = max(worst[part], difference)
            if difference > tolerance:
                raise LawError(f"{prefix} {tensor_name} differs by {difference:.1e}; {variant.advice}")
    return ChunkReport(len(variants), **worst)


def _variants(block: Block, num_steps: int, num_rows: int, cuts: Iterable[Sequence[int]] | None) -> list[_Variant]:
    all_rows, half = [slice(0, num_rows)], num_rows // 2
    halves = [slice(0, half), slice(half, num_rows)]
    possible = range(block.stride, num_steps, block.stride)
    if cuts is None:
        cuts = [*([cut] for cut in possible), possible]
    cut_lists = [list(cut_list) for cut_list in cuts] or [[possible[len(possible) // 2]]]  # `cuts` may be empty
    last = cut_lists[-1]
    for cut_list in cut_lists:
        if block.stride > 1 and not set(cut_list) <= set(possible):
            raise LawError(
                f"cuts={cut_list} are not all multiples of the stride of {type(block).__name__}; use {list(possible)}"
            )
    keep_nothing = "keep nothing between calls except in the state, and derive random numbers from the state"
    separate_rows = f"don't mix rows, {keep_nothing}"
    use_state = "let a time step depend only on its input and the state, and don't detach the state"
    carry_state = "let `begin` return the carried state of rows that aren't fresh"
    use_maps = "let `run_affine` compute what `forward` does, and `then` combine maps from the earlier to the later"
    affine = _Variant(f"combined from the affine maps of parts cut at {last}", last, all_rows, use_maps, is_affine=True)
    return [
        _Variant("run again from the same state", [], all_rows, keep_nothing),
        *(_Variant(f"cut in time at {cut_list}", cut_list, all_rows, use_state) for cut_list in cut_lists),
        _Variant(f"run in windows that carry state, cut at {last}", last, all_rows, carry_state, is_stateful=True),
        _Variant("run on two halves of its rows", [], halves, separate_rows),
        _Variant(f"run on two halves of its rows, cut at {last}", last, halves, separate_rows),
        *([affine] if isinstance(block, AffineBlock) and not has_own_forward(block) else []),
    ]


def _run(block: Block, x: Tensor, variant: _Variant, key: int) -> _Result:
    """Run the chunks, alternating between the micro-batches, then one backward through all of them."""
    with _backward_in_any_mode(block):
        return _run_with_backward(block, x, variant, key)


@contextmanager
def _backward_in_any_mode(block: Block) -> Iterator[None]:
    """Turn cuDNN off if a part of the block is in eval mode: cuDNN's RNNs have a backward in training mode only."""
    was_enabled = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = was_enabled and all(module.training for module in block.modules())
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = was_enabled


def _run_with_backward(block: Block, x: Tensor, variant: _Variant, key: int) -> _Result:
    block.zero_grad(set_to_none=True)
    x = _as_leaf(x)
    # As in an engine, each micro-batch makes its initial state, which can depend on a row's lane but not on its index.
    micro_batches = [_rows(block, x, key)[row_slice] for row_slice in variant.row_slices]
    initial_states = [tuple(map(_as_leaf, block.begin(micro_batch))) for micro_batch in micro_batches]
    states = list(initial_states)
    outputs: list[list[Tensor]] = [[] for _ in micro_batches]
    if variant.is_affine:
        assert isinstance(block, AffineBlock)
        outputs[0], states[0] = _run_maps(block, x.tensor_split(variant.cuts), states[0])
    for start, stop in [] if variant.is_affine else pairwise([0, *variant.cuts, x.shape[0]]):
        for index, row_slice in enumerate(variant.row_slices):
            if variant.is_stateful and start:
                rows = micro_batches[index]
                continued = replace(rows, lengths=rows.lengths - start, fresh=~rows.fresh)  # none is fresh now
                states[index] = block.begin(continued, states[index])
            y, states[index] = block(x[start:stop, row_slice], states[index])
            outputs[index].append(y)
    y = torch.cat([torch.cat(chunk_outputs) for chunk_outputs in outputs], dim=1)
    final_state = cat_rows(states)
    _backward((y, *final_state))
    gradients = {name: leaf.grad for name, leaf in (*block.named_parameters(), ("input", x)) if leaf.grad is not None}
    block.zero_grad(set_to_none=True)
    for index, leaves in enumerate(zip(*initial_states, strict=True)):
        row_gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        if row_gradients:
            gradients[f"initial state {index}"] = torch.cat(row_gradients)
    return {
        "outputs": {"the output": y.detach()},
        "state": {f"tensor {index} of the state": tensor for index, tensor in enumerate(detach(final_state))},
        "gradients": {f"the gradient of {name}": gradient for name, gradient in gradients.items()},
    }


def _run_maps(block: AffineBlock, parts: Sequence[Tensor], state: State) -> tuple[list[Tensor], State]:
    """Run parts that don't know the state before them, then combine their maps from the first to the last."""
    runs = [block.run_affine(part) for part in parts]
    outputs, combined = [runs[0].outputs(state)], runs[0].state_map
    for run in runs[1:]:
        outputs.append(run.outputs(combined(state)))
        # As if the map came from another rank.
        combined = combined.then(run.state_map.with_tensors(run.state_map.tensors))
    return outputs, combined(state)


def _dtype(block: Block, x: Tensor) -> torch.dtype:
    if x.is_floating_point():
        return x.dtype
    return next((parameter.dtype for parameter in block.parameters()), torch.get_default_dtype())


def _rows(block: Block, x: Tensor, key: int) -> Rows:
    return Rows.of(x.shape[1], x.shape[0], key=key, device=x.device, dtype=_dtype(block, x))


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def _backward(tensors: State) -> None:
    """Run the backward of a sum with unequal weights, so that errors in several steps or rows don't cancel out."""
    tracked = [tensor for tensor in tensors if tensor.requires_grad]
    weights = [torch.arange(1.0, t.numel() + 1, device=t.device).sin().view_as(t).to(t.dtype) for t in tracked]
    torch.autograd.backward(tracked, weights)


def _check_shapes(block: Block, whole: _Result, x: Tensor, key: int) -> None:
    """Raise LawError unless the output has the length that follows from the stride, and the state keeps its shapes.

    The state must also keep its dtypes, and have the batch in dim 0.
    """
    name, num_rows = type(block).__name__, x.shape[1]
    num_outputs, num_expected = len(whole["outputs"]["the output"]), -(-len(x) // block.stride)
    if num_outputs != num_expected:
        raise LawError(
            f"{name} turns {len(x)} time steps into {num_outputs}, but with stride={block.stride} there must be "
            f"{num_expected}; set `stride` to the number of time steps that make one output"
        )
    initial_state = block.begin(_rows(block, x, key))
    initial, final = (
        [(list(tensor.shape), tensor.dtype) for tensor in state] for state in (initial_state, whole["state"].values())
    )
    if initial != final:
        raise LawError(f"{name} starts with state {initial} but returns {final}; return the same shapes and dtypes")
    for index, (shape, _) in enumerate(initial):
        if not shape or shape[0] != num_rows:
            raise LawError(f"state tensor {index} of {name} has shape {shape}; dim 0 must be the batch ({num_rows})")


def _compare(whole: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[str, float]:
    """Return the name of the tensor that differs most, relative to its largest value, and by how much."""
    largest = {name: _max_abs(tensor) for name, tensor in whole.items()}
    # The scale of tensors with only tiny values, such as rounding errors, is 1/1000 of the overall largest value.
    min_scale = 1e-3 * max(largest.values(), default=0.0) or 1.0
    differences = [
        (name, _difference(tensor, other.get(name), max(largest[name], min_scale))) for name, tensor in whole.items()
    ]
    return max(differences, key=lambda pair: pair[1], default=("nothing", 0.0))


def _max_abs(tensor: Tensor) -> float:
    """Return the largest absolute value."""
    return float(tensor.abs().max()) if tensor.is_floating_point() and tensor.numel() else 0.0


def _difference(expected: Tensor, actual: Tensor | None, scale: float) -> float:
    """Return the largest difference over `scale`; infinite for NaN, a missing tensor, or unequal shapes or integers."""
    if actual is None or actual.shape != expected.shape:
        return torch.inf
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else torch.inf
    difference = float((actual - expected).abs().max()) / scale if expected.numel() else 0.0
    return difference if difference < torch.inf else torch.inf  # also for NaN


@use_tf32(False)
def check_loss(
    loss: Loss, y: Tensor, targets: Tensor, *, lengths: Tensor | None = None, tolerance: float = 1e-4
) -> None:
    """Raise a `LawError` unless the losses of two parts of a batch, split in time or rows, sum to that of the whole.

    A loss over whole rows is split in rows only; `lengths` is the number of time steps of each row, by default all.
    Nothing after a row's last time step may change it.
    """
    loss = as_loss(loss)
    if isinstance(loss, RowLoss):
        _check_row_loss(loss, y, targets, lengths, tolerance)
        return
    whole = _without_graph(loss(y, targets))
    if not math.isfinite(whole.total):
        raise LawError(
            f"the loss is {float(whole.total)}, so its parts can't be compared; check the outputs and targets"
        )
    for axis, dim in (("time", 0), ("rows", 1)):
        cut = max(1, y.shape[dim] // 3)
        if cut == y.shape[dim]:
            continue
        # Parts of different sizes, because errors of two equal parts could cancel out.
        split = zip(y.tensor_split([cut], dim), targets.tensor_split([cut], dim), strict=True)
        _check_sum(axis, whole, [_without_graph(loss(*pair)) for pair in split], tolerance)


def _without_graph(loss: LossSum) -> LossSum:
    """Return a loss detached from its graph, which it has if the loss has weights."""
    return replace(loss, total=loss.total.detach())


@torch.no_grad()  # a CRF has weights
def _check_row_loss(loss: RowLoss, y: Tensor, targets: Tensor, lengths: Tensor | None, tolerance: float) -> None:
    if lengths is None:
        lengths = torch.full((y.shape[1],), len(y))
    whole = call_row_loss(loss, y, targets, lengths)
    if not math.isfinite(whole.total):
        raise LawError(f"the loss is {float(whole.total)}, so its parts can't be compared; check its outputs")
    cut = max(1, y.shape[1] // 3)
    if cut < y.shape[1]:
        parts = [slice(cut), slice(cut, None)]
        losses = [call_row_loss(loss, y[:, rows], targets[:, rows], lengths[rows]) for rows in parts]
        _check_sum("rows", whole, losses, tolerance)
    is_padding = torch.arange(len(y)).unsqueeze(1) >= lengths
    changed = y.clone()
    changed[is_padding.to(y.device)] = 1.0 - y[is_padding.to(y.device)]
    padded = call_row_loss(loss, changed, targets, lengths)
    if not abs(float(padded.total) - float(whole.total)) <= tolerance * abs(float(whole.total)):
        raise LawError(
            f"the loss changes from {float(whole.total):.6g} to {float(padded.total):.6g} with outputs after the last "
            "time step of rows; use the first `lengths` outputs of each row only"
        )


def _check_sum(axis: str, whole: LossSum, parts: Sequence[LossSum], tolerance: float) -> None:
    """Raise unless the losses of parts sum to that of the whole."""
    total, count = sum(float(part.total) for part in parts), sum(int(part.count) for part in parts)
    weight = sum(float(_weight(part)) for part in parts)
    scale = max(abs(float(part.total)) for part in (whole, *parts))
    # `not ... <=` instead of `>`, so that NaN fails the check.
    is_sum = count == int(whole.count) and math.isclose(weight, float(_weight(whole)), rel_tol=tolerance)
    if not is_sum or not abs(total - float(whole.total)) <= tolerance * scale:
        raise LawError(
            f"the loss is not a sum over {axis}: two parts give {total:.6g} over {count} targets, the whole "
            f"{float(whole.total):.6g} over {int(whole.count)}; return a sum and a count, never a mean"
        )


def _weight(loss_sum: LossSum) -> Tensor:
    return loss_sum.count if loss_sum.weight is None else loss_sum.weight
