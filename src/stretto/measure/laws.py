"""Checks of the chunk law: does cutting a block in time, or splitting its rows, change what it computes?"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from stretto.base.errors import LawError
from stretto.base.state import State, detach, join_rows, slice_rows
from stretto.base.window import Rows
from stretto.blocks.block import Block


@dataclass(frozen=True)
class ChunkReport:
    """How many ways of running were compared, and the largest differences from the whole, relative to its values."""

    num_ways: int
    outputs: float
    state: float
    gradients: float


@dataclass(frozen=True)
class _Way:
    """One way of running a block that must give what running it whole gives."""

    what: str
    cuts: Sequence[int]
    slices: Sequence[slice]
    advice: str


@dataclass(frozen=True)
class _Result:
    """What one run of a block gave, each part a list of named tensors."""

    outputs: dict[str, Tensor]
    state: dict[str, Tensor]
    gradients: dict[str, Tensor]


def check_chunk_law(
    block: Block,
    x: Tensor,
    *,
    cuts: Iterable[Sequence[int]] | None = None,
    tolerance: float = 1e-12,
    key: int = 0,
) -> ChunkReport:
    """Check that a block keeps the chunk law on `x` (`[time, batch, ...]`); raise a LawError that says how it doesn't.

    The block runs as it is, in its own dtype and mode; use `block.double()` and a float64 `x`, or rounding looks
    like a broken law. It runs whole, whole again, cut in time at each of `cuts` (every single cut and every step
    if not given), and with its rows in two halves whose chunks take turns, as slices do in a pipeline. Outputs,
    final state and gradients (of parameters, input and initial state) must agree to `tolerance`.
    """
    name = type(block).__name__
    if not block.causal:
        raise LawError(
            f"{name} declares causal=False: it looks ahead in time and is never cut there; check another block"
        )
    num_steps, num_rows = x.shape[:2]
    if num_steps < 2 or num_rows < 2:
        raise LawError(f"x has {num_steps} steps and {num_rows} rows; give at least 2 of each, or nothing can be cut")
    whole = _run(block, x, _Way("run whole", [], [slice(0, num_rows)], ""), key)
    _check_form(block, whole, x, key)
    worst = {"outputs": 0.0, "state": 0.0, "gradients": 0.0}
    ways = _ways(num_steps, num_rows, cuts)
    for way in ways:
        try:
            result = _run(block, x, way, key)
        except RuntimeError as error:
            raise LawError(f"{name} breaks the chunk law: {way.what}, it fails ({error}); {way.advice}") from error
        for part in worst:
            tensor, difference = _compare(getattr(whole, part), getattr(result, part))
            worst[part] = max(worst[part], difference)
            if not difference <= tolerance:
                raise LawError(
                    f"{name} breaks the chunk law: {way.what}, {tensor} differs by {difference:.1e}; {way.advice}"
                )
    return ChunkReport(len(ways), **worst)


def _ways(num_steps: int, num_rows: int, cuts: Iterable[Sequence[int]] | None) -> list[_Way]:
    whole, half = [slice(0, num_rows)], num_rows // 2
    halves = [slice(0, half), slice(half, num_rows)]
    if cuts is None:
        cuts = [*([cut] for cut in range(1, num_steps)), range(1, num_steps)]
    listed = [list(cut) for cut in cuts]
    keep_nothing = "keep nothing between calls and mix no rows: state goes in and comes out as a value"
    look_back = "a step may depend on the state and on earlier steps only"
    return [
        _Way("run a second time from the same state", [], whole, keep_nothing),
        *(_Way(f"cut in time at {cut}", cut, whole, look_back) for cut in listed),
        *(_Way(f"run in two halves of its rows, cut at {cut}", cut, halves, keep_nothing) for cut in ([], listed[-1])),
    ]


def _run(block: Block, x: Tensor, way: _Way, key: int) -> _Result:
    """Run the slices' chunks in turns, then one backward through all of it."""
    block.zero_grad(set_to_none=True)
    x = _as_leaf(x)
    begin = tuple(map(_as_leaf, block.begin(Rows.of(x.shape[1], x.shape[0], key=key, device=x.device))))
    states = [slice_rows(begin, rows) for rows in way.slices]
    chunks: list[list[Tensor]] = [[] for _ in way.slices]
    for start, stop in pairwise([0, *way.cuts, x.shape[0]]):
        for index, rows in enumerate(way.slices):
            y, states[index] = block(x[start:stop, rows], states[index])
            chunks[index].append(y)
    y = torch.cat([torch.cat(row_chunks) for row_chunks in chunks], dim=1)
    after = join_rows(states)
    _backward((y, *after))
    leaves = (*block.named_parameters(), ("input", x), *((f"initial state {i}", leaf) for i, leaf in enumerate(begin)))
    return _Result(
        outputs={"the output": y.detach()},
        state={f"tensor {index} of the state": tensor for index, tensor in enumerate(detach(after))},
        gradients={f"the gradient of {name}": leaf.grad for name, leaf in leaves if leaf.grad is not None},
    )


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def _backward(tensors: State) -> None:
    """Take the gradient of an uneven sum: gradients that agree only in their plain sum are not equal."""
    tracked = [tensor for tensor in tensors if tensor.requires_grad]
    weights = [torch.arange(1.0, t.numel() + 1, device=t.device).sin().view_as(t).to(t.dtype) for t in tracked]
    torch.autograd.backward(tracked, weights)


def _check_form(block: Block, whole: _Result, x: Tensor, key: int) -> None:
    """A state must keep its form, or the next chunk and the checkpoint can't take it."""
    name, num_rows = type(block).__name__, x.shape[1]
    before = block.begin(Rows.of(num_rows, x.shape[0], key=key, device=x.device))
    forms = [[(list(tensor.shape), tensor.dtype) for tensor in state] for state in (before, whole.state.values())]
    if forms[0] != forms[1]:
        raise LawError(f"{name} takes a state of {forms[0]} but returns {forms[1]}; return one of the same form")
    for index, (shape, _) in enumerate(forms[0]):
        if not shape or shape[0] != num_rows:
            raise LawError(f"{name}'s state {index} has shape {shape}; the batch of {num_rows} rows must be its dim 0")


def _compare(whole: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[str, float]:
    """Return the tensor that differs most, relative to the largest value of all, and by how much."""
    reals = [float(tensor.abs().max()) for tensor in whole.values() if tensor.is_floating_point() and tensor.numel()]
    scale = max(reals, default=0.0) or 1.0
    found = [(name, _difference(tensor, other.get(name), scale)) for name, tensor in whole.items()]
    return max(found, key=lambda pair: pair[1], default=("nothing", 0.0))


def _difference(this: Tensor, that: Tensor | None, scale: float) -> float:
    """Infinite where one is missing, of another shape, not finite, or a whole number that is not the same."""
    if that is None or this.shape != that.shape:
        return torch.inf
    if not this.is_floating_point():
        return 0.0 if torch.equal(this, that) else torch.inf
    difference = float((this - that).abs().max()) / scale if this.numel() else 0.0
    return difference if difference < torch.inf else torch.inf
