"""linear_scan: the recurrence `h = decay * h + added` for all time steps, without a Python loop over them.

Time is cut into blocks of 16 steps, all of which are computed at once as if they started from zero. Then the states at
the ends of the blocks are computed, by the same function, and each block is corrected for the state before it:

    time       0 1 2 3 | 4 5 6 7 | 8 9 ..       4 steps of each block for all blocks at once
    ends             3 ------> 7 ------> ..     a scan over the blocks
    corrected          | 4 5 6 7 | 8 9 ..       h += product of the block's decays so far * h at the block's start

`scan_summary` is what a stretch does to any initial state: the product of its decays, and the last state from zero. It
reads the decays and what is added once, block by block, and so is quicker than a scan.

There are no logarithms and no divisions, so decays of 0, and products that underflow, are exact.
"""

from typing import Any

import torch
from torch import Tensor

# Time steps of a block. A scan over at most twice as many is a plain loop.
_BLOCK_STEPS = 16


def linear_scan(decay: Tensor, added: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """Return `h[t] = decay[t] * h[t - 1] + added[t]` for all `t`, with `h[-1] = initial`, and the last `h`.

    `decay` and `added` are `[time, ...]`, `initial` is `[...]`, all of one dtype.
    """
    return _LinearScan.apply(decay, added, initial)  # type: ignore[no-untyped-call,no-any-return]


def linear_scan_with_early_gradient(decay: Tensor, added: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """Return `linear_scan`, of which the gradient of `initial` can be computed alone and first, in less than a scan."""
    h, last = linear_scan(decay, added, initial.detach())
    return _AddInitialGradient.apply(h, last, decay.detach(), initial)  # type: ignore[no-untyped-call,no-any-return]


def scan_summary(decay: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Return the product of the decays, and the last `h` of a scan from zero."""
    return _ScanSummary.apply(decay, added)  # type: ignore[no-untyped-call,no-any-return]


class _LinearScan(torch.autograd.Function):
    """The scan; its gradient is a scan in the other direction, so that only the outputs are saved."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, added: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        h = _scan(decay, added, initial, reverse=False)
        ctx.save_for_backward(decay, initial, h)
        return h, h[-1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, last_gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
        decay, initial, h = ctx.saved_tensors
        # The gradient of h[t] is its own plus that of h[t + 1], which is decay[t + 1] * h[t] + ...
        later_decay = torch.cat([decay[1:], torch.ones_like(decay[:1])])
        added_gradient = _scan(later_decay, gradient, last_gradient, reverse=True)
        before = torch.cat([initial.unsqueeze(0), h[:-1]])
        return added_gradient * before, added_gradient, added_gradient[0] * decay[0]


class _AddInitialGradient(torch.autograd.Function):
    """Returns a scan as it is; `initial`, which it was computed from as a constant, gets its gradient here."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, last: Tensor, decay: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        ctx.save_for_backward(decay)
        ctx.summarized = None
        return h.view_as(h), last.view_as(last)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, last_gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        if not ctx.needs_input_grad[3]:
            return gradient, last_gradient, None, None
        (decay,) = ctx.saved_tensors
        # A span first asks for this gradient alone, and then for the others, from the same gradient of `h`.
        if ctx.summarized is not gradient or ctx.version != gradient._version:
            ctx.summary = _summarize(decay[1:], gradient[:-1], reverse=True)
            ctx.summarized, ctx.version = gradient, gradient._version
        product, end = ctx.summary
        return gradient, last_gradient, None, decay[0] * (product * (gradient[-1] + last_gradient) + end)


class _ScanSummary(torch.autograd.Function):
    """The summary of a scan; its gradient is computed by whole scans."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        ctx.save_for_backward(decay, added)
        return _summarize(decay, added, reverse=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, product_gradient: Tensor, end_gradient: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        decay, added = ctx.saved_tensors
        zeros = torch.zeros_like(decay)
        later = torch.cat([_scan(decay[1:], zeros[1:], torch.ones_like(decay[0]), reverse=True), zeros[:1] + 1])
        earlier = torch.cat([zeros[:1] + 1, _scan(decay[:-1], zeros[1:], torch.ones_like(decay[0]), reverse=False)])
        before = torch.cat([zeros[:1], _scan(decay[:-1], added[:-1], zeros[0], reverse=False)])
        added_gradient = later * end_gradient
        return added_gradient * before + later * earlier * product_gradient, added_gradient


def _scan(decay: Tensor, added: Tensor, initial: Tensor, *, reverse: bool) -> Tensor:
    """Return the scan from the first to the last time step, or if `reverse` from the last to the first."""
    h = torch.empty_like(added, memory_format=torch.contiguous_format)
    blocks, rest = _blocks_and_rest(len(decay), reverse)
    if len(decay[blocks]):
        _scan_blocks(decay[blocks], added[blocks], initial, h[blocks], reverse=reverse)
        initial = h[blocks][0 if reverse else -1]
    for step in _order(len(decay[rest]), reverse):
        initial = torch.addcmul(added[rest][step], decay[rest][step], initial, out=h[rest][step])
    return h


def _scan_blocks(decay: Tensor, added: Tensor, initial: Tensor, h: Tensor, *, reverse: bool) -> None:
    """Write the scan over a number of complete blocks into `h`."""
    decay, added, h = (torch.unflatten(tensor, 0, (-1, _BLOCK_STEPS)) for tensor in (decay, added, h))
    product = torch.empty_like(decay, memory_format=torch.contiguous_format)  # of the block's decays so far
    first, *others = _order(_BLOCK_STEPS, reverse)
    h[:, first], product[:, first] = added[:, first], decay[:, first]
    before = first
    for step in others:
        torch.addcmul(added[:, step], decay[:, step], h[:, before], out=h[:, step])
        torch.mul(product[:, before], decay[:, step], out=product[:, step])
        before = step
    ends = _scan(product[:, before], h[:, before], initial, reverse=reverse)
    starts = [ends[1:], initial.unsqueeze(0)] if reverse else [initial.unsqueeze(0), ends[:-1]]
    h.addcmul_(product, torch.cat(starts).unsqueeze(1))


def _summarize(decay: Tensor, added: Tensor, *, reverse: bool) -> tuple[Tensor, Tensor]:
    """Return the product of the decays, and the last state of a scan from zero."""
    shape, (blocks, rest) = decay.shape[1:], _blocks_and_rest(len(decay), reverse)
    product, end = decay.new_ones(shape), added.new_zeros(shape)
    if len(decay[blocks]):
        block_decay, block_added = (torch.unflatten(t[blocks], 0, (-1, _BLOCK_STEPS)) for t in (decay, added))
        first, *others = _order(_BLOCK_STEPS, reverse)
        products, ends = block_decay[:, first].clone(), block_added[:, first].clone()
        for step in others:
            products.mul_(block_decay[:, step])
            torch.addcmul(block_added[:, step], block_decay[:, step], ends, out=ends)
        product, end = _summarize(products, ends, reverse=reverse)
    for step in _order(len(decay[rest]), reverse):
        product = product * decay[rest][step]
        end = torch.addcmul(added[rest][step], decay[rest][step], end)
    return product, end


def _blocks_and_rest(num_steps: int, reverse: bool) -> tuple[slice, slice]:
    """Return the time steps that fill blocks, and those that don't, which come last."""
    num_rest = num_steps if num_steps <= 2 * _BLOCK_STEPS else num_steps % _BLOCK_STEPS
    if reverse:
        return slice(num_rest, None), slice(num_rest)
    return slice(num_steps - num_rest), slice(num_steps - num_rest, None)


def _order(count: int, reverse: bool) -> range:
    return range(count)[::-1] if reverse else range(count)
