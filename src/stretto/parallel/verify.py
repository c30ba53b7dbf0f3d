"""verify: compares a parallelized module with the user's own on one device, on the user's data, in float64."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stretto.base.errors import ConfigError
from stretto.base.reason import class_and_reason
from stretto.base.trees import tensors_of
from stretto.parallel.fixed import FixedLayouts
from stretto.parallel.groups import whole_group
from stretto.parallel.layout import Layout
from stretto.parallel.module import attach, layers_of, mixing_of, regions_of
from stretto.parallel.recording import (
    TOLERANCE,
    WHOLE,
    Calls,
    LossFunction,
    compare,
    copy_in_float64,
    difference,
    record_step,
)
from stretto.parallel.region import Region
from stretto.parallel.tune import rank_counts

_T = TypeVar("_T")


@dataclass(frozen=True)
class Comparison:
    """What `verify` finds, alike on all ranks. Print it; in a test, `assert result.is_equal, result`."""

    outputs: float  # the largest difference of what a submodule returns, final states included; relative beyond 1
    loss: float  # the largest difference of a rank's loss; relative beyond 1
    gradients: float  # the largest difference of a gradient, relative to the largest gradient of the whole module
    first: str  # the first submodule that differs, or the loss, or the gradient that differs most; or empty
    mixing: str  # the first submodule that mixes rows; or empty
    is_shared: bool  # whether ranks have computed some layer together
    local: tuple[str, ...]  # the parallelized layers that each rank has computed alone, with the reason

    @property
    def is_equal(self) -> bool:
        """Whether ranks compute together what each of them computes alone."""
        return all(difference <= TOLERANCE for difference in (self.outputs, self.loss, self.gradients))

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if not self.is_equal:
            return f"the parallelized module differs from your own on one device, first in {self.first}"
        sentence = "the parallelized module equals your own on one device"
        if not self.is_shared:
            sentence = f"no work was shared, so there was nothing to compare: {'; '.join(self.local)}"
        if self.mixing:
            sentence += (
                f"; but {self.mixing} mixes rows, so several ranks compute something else than one device with all "
                "rows, as under DistributedDataParallel; use nn.SyncBatchNorm"
            )
        return sentence

    def __str__(self) -> str:
        differences = {"outputs and final states": self.outputs, "loss": self.loss, "gradients": self.gradients}
        table = [f"  {name:26}{value:.1e}" for name, value in differences.items()]
        local = [f"  computed by each rank alone: {layer}" for layer in self.local if self.is_shared]
        return "\n".join([self.verdict, f"  largest difference (equal up to {TOLERANCE:.0e}):", *table, *local])


def verify(
    module: nn.Module,
    batch: Any,  # noqa: ANN401
    loss: Callable[[Any, Any], Tensor],
    *,
    layout: Layout | None = None,
) -> Comparison:
    """Compare a parallelized module with the user's own on one device: outputs, final states, loss, all gradients.

    All ranks call this together, each with rows of its own. `batch` is what the script's loader gives: a tensor, or any
    tuple, list or dict of them. `loss(module, batch)` does with them what the script does, and returns its scalar:

        result = stretto.verify(model, (x, y), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))

    It gets a float64 copy of the module and of the batch, and should use no other tensors. The module itself, its
    gradients, buffers and mode, and the random numbers to come stay as they are. Gradients are the mean over ranks, as
    with DistributedDataParallel. A submodule that mixes rows, as BatchNorm does in training, computes something else on
    several ranks, with regions or without: `verify` names the first one.

    Recurrent layers are compared in training mode, and without their dropout, because torch draws other masks than a
    region does; all else keeps its mode. `layout` takes the place of the regions' own; for those
    with `layout="auto"`, it is the one with the most ranks.
    """
    module = module.module if isinstance(module, DistributedDataParallel) else module
    if not regions_of(module):
        raise ConfigError("no layer of the module is shared; call stretto.parallelize(module) before stretto.verify")
    plain, recorded, mixing = _run_alone(module, batch, loss)
    shared = _copy_of_parallelized(module, layout)
    actual, actual_loss = record_step(shared, batch, loss)
    expected, expected_loss = recorded or (actual, actual_loss)
    place, first, outputs = compare(actual, expected)
    local = {name: _why_local(region) for name, region in regions_of(shared).items()}
    ranks = _gather((place, first, outputs, difference(actual_loss, expected_loss), local))
    parameter, gradients = _compare_gradients(shared, plain)
    local = {name: reason for name, reason in local.items() if all(reasons[name] for *_, reasons in ranks)}
    losses = max(difference for *_, difference, _ in ranks)
    later = "the loss" if losses > TOLERANCE else f"the gradient of {parameter}" if gradients > TOLERANCE else ""
    return Comparison(
        outputs=max(difference for _, _, difference, *_ in ranks),
        loss=losses,
        gradients=gradients,
        first=min(ranks, key=lambda rank: rank[0])[1] or later,
        mixing=mixing,
        is_shared=len(local) < len(regions_of(shared)),
        local=tuple(f"{name or WHOLE} ({reason})" for name, reason in local.items()),
    )


def _run_alone(
    module: nn.Module,
    batch: Any,  # noqa: ANN401
    loss: LossFunction,
) -> tuple[nn.Module, tuple[Calls, Tensor] | None, str]:
    """Return a plain copy with its gradients, its calls and loss if this rank has rows, and what mixes rows."""
    tensors = tensors_of(batch)
    has_rows = not tensors or any(tensor.numel() for tensor in tensors)
    recorded: tuple[Calls, Tensor] | None = None
    error: Exception | None = None
    mixing = ""
    try:
        plain = copy_in_float64(module)
        # Torch runs no LSTM over no packed rows; a region does, and this rank's part of the gradient is zero.
        with suppress(*(() if has_rows else (RuntimeError, IndexError))):
            recorded = record_step(plain, batch, loss)
        mixing = mixing_of(module)
    except Exception as raised:  # noqa: BLE001 - the other ranks have to know first
        error = raised
    answers = _gather(("" if error is None else class_and_reason(error), mixing))
    if error is not None:
        error.add_note(
            "stretto.verify copies the module and the batch in float64: put other tensors of the loss into the batch, "
            "and call it before fully_shard"
        )
        raise error
    for rank, (reason, _) in enumerate(answers):
        if reason:
            raise ConfigError(f"stretto.verify failed on rank {rank}, on one device: {reason}")
    return plain, recorded, next((name for _, name in answers if name), "")


def _copy_of_parallelized(module: nn.Module, layout: Layout | None) -> nn.Module:
    shared = copy_in_float64(module)
    for name, region in regions_of(module).items():
        child = shared.get_submodule(name)
        attach(child, Region(layers_of(child), region.name, _choice_for(region, layout), region.mesh))
    return shared


def _choice_for(region: Region, layout: Layout | None) -> FixedLayouts:
    """Return the region's own choice if that is fixed; otherwise the layout with the most ranks, which auto may try."""
    if layout is None and isinstance(region.choice, FixedLayouts):
        return region.choice
    if layout is not None and not region.is_bidirectional:
        layout.check(region.name, region.num_layers)
    if layout is None:
        counts = rank_counts(whole_group(region.mesh), region) if dist.is_initialized() else []
        count = max(counts, default=1)
        layout = Layout(spans=count) if region.is_bidirectional else Layout(count, 2 * count)
    return FixedLayouts(layout)


def _compare_gradients(shared: nn.Module, plain: nn.Module) -> tuple[str, float]:
    """Return the largest difference of a mean gradient, relative to the largest of all, and its parameter's name."""
    first, largest, scale = "", 0.0, 0.0
    for (name, one), other in zip(shared.named_parameters(), plain.parameters(), strict=True):
        if not one.requires_grad or not one.numel():
            continue
        grads = [torch.zeros_like(each) if each.grad is None else each.grad.to_dense() for each in (one, other)]
        pair = torch.stack(grads)
        if dist.is_initialized():
            dist.all_reduce(pair)
        actual, expected = pair.detach()
        if not expected.isfinite().all():
            raise ConfigError(f"the gradient of {name} is not finite on one device; use a batch for which it is")
        scale = max(scale, float(expected.abs().max()))
        delta = float((actual - expected).abs().max().nan_to_num(math.inf))
        if delta > largest:
            first, largest = name, delta
    return first, largest / (scale or 1.0)


def _why_local(region: Region) -> str:
    """Return why each rank has computed a layer alone; empty if it has not."""
    if region.has_shared:
        return ""
    if not dist.is_initialized():
        return "there is no process group; start the script with torchrun"
    layouts = [layout for layout in region.choice.layouts(region).values() if region.num_ranks(layout) > 1]
    if not layouts:
        return "its layout is local"
    steps = min(2 * (layout.spans if region.is_bidirectional else layout.chunks) for layout in layouts)
    return f"no call has gradients and at least {steps} steps"


def _gather(value: _T) -> list[_T]:
    """Return a value of every rank."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
