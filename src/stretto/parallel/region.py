"""Region: recurrent layers whose work is shared by several ranks, each with rows of its own.

A call: the ranks compare what they are about to do (`guard`), choose a layout from that (`choice`, `tune`), and compute
the layers alone, in stages or in spans. All of this is differentiable, so the backward is the same from end to start.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from stretto.base.errors import ConfigError, MeshError
from stretto.base.reason import short_reason
from stretto.blocks.cudnn_weights import has_bf16
from stretto.parallel.groups import REGION_NAMES, Group, say, say_once
from stretto.parallel.guard import DTYPES, REMEDY, Call
from stretto.parallel.layers import CallRows, Inputs, Layers, SharedCall
from stretto.parallel.layout import Layout, Layouts
from stretto.parallel.rows import Packing
from stretto.parallel.spans import run_spans
from stretto.parallel.split import SplitWeights
from stretto.parallel.stages import run_stages

_CHECKED_CALLS = (1, 20)  # in which ranks compare their weights: the first one, and one after some steps
_CALLS_OF_ONE_STEP = 50  # in a row from the first one: of a decoder's loop


class Choice(Protocol):
    """What the regions of a module ask."""

    def bind(self, region: "Region") -> Group | None:
        """Return the ranks that compare their calls, or None if none will be shared. All ranks call this together."""

    def choose(self, region: "Region", layers: Layers, inputs: Inputs, group: Group, calls: Sequence[Call]) -> Layout:
        """Return the layout of a call, for which every rank of the group has the same `calls`."""

    def progress(self) -> tuple[int, int]:
        """Return how many optimizer steps this rank has taken, and of how many it knows the time."""

    def layouts(self, region: "Region") -> Layouts:
        """Return what has been decided for a region."""

    def checksum(self, region: "Region") -> int:
        """Return a number that is another one for other choices."""


class Region:
    """How the layers of one module are computed by the ranks of a group."""

    def __init__(
        self,
        layers: Layers,
        name: str,
        choice: Choice,
        mesh: DeviceMesh | None = None,
        batch_norm: Callable[[], str] = str,  # the name of a submodule of the same module that mixes rows
    ) -> None:
        self.name, self.choice, self.mesh, self._batch_norm = name, choice, mesh, batch_norm
        self.num_layers, self.is_bidirectional = layers.num_layers, layers.is_bidirectional
        self.is_local = False  # for good: no message any more
        self._index = len(REGION_NAMES)
        REGION_NAMES.append(name)
        self._group: Group | None = None  # the ranks that compare their calls
        self._world: Callable[[], dist.ProcessGroup | None] = _nothing  # that it is in
        self._num_calls = self._num_calls_of_one_step = 0
        self._packing: Packing | None = None  # of the last call
        self.split: SplitWeights | None = None  # whether each rank keeps the parameters of its own stage only
        self.has_shared = False  # whether ranks have computed a call together

    def __call__(self, layers: Layers, *arguments: Any) -> Any:  # noqa: ANN401 - as the module's
        """Compute a call of the module alone or together with the ranks of the group."""
        has_grad = torch.is_grad_enabled()
        if self.split is None and not has_grad:  # a reentrant checkpoint calls it again with gradients, and together
            return layers.run_alone(None, *arguments)
        if self._world() is not dist.group.WORLD:  # the first call, or the process group was made anew
            if self.split is not None:
                raise MeshError(f"{self.name} has its layers on ranks of a process group that has ended; build it anew")
            self.bind()
        if self._group is None or self.is_local:
            return layers.run_alone(None, *arguments)
        number = self._group.guard.next_number(self._index)
        try:
            inputs = layers.read(*arguments)
            own = self._describe(number, layers, inputs)
        except Exception:  # the other ranks have to know first
            self._group.guard.compare(Call(self._index, number, is_backward=False, dtype=0, width=0, is_refused=True))
            raise
        calls = self._group.guard.compare(own)
        if self.split is not None:
            self.split.before_call(layers.module, own)
        elif own.number in _CHECKED_CALLS:
            self._check_weights(layers.module, self._group, own)
        layout = self.choice.choose(self, layers, inputs, self._group, calls)
        if self.split is None:
            self._stay_local_after_one_step_calls(max(call.longest for call in calls))
        if self.num_ranks(layout) == 1:
            return layers.run_alone(own.seed, *arguments)
        self.has_shared = True
        y, state = self._run_together(layers, inputs, layout, self._group, calls)
        return inputs.as_output(y, state)

    def _check_weights(self, module: nn.Module, group: Group, call: Call) -> None:
        """Raise on all ranks if they have different weights: each computes a part for the rows of all."""
        # Parameters only: what a module sets before each call, such as dropped weights, may differ.
        parameters = dict(module.named_parameters())
        sums = torch.tensor(
            [float(each.detach().sum(dtype=torch.float64)) for each in parameters.values()], dtype=torch.float64
        )
        for name, *values in zip(parameters, *group.guard.gather(sums.view(torch.int64).tolist(), call), strict=True):
            if len({*values}) > 1:
                raise ConfigError(
                    f"ranks have different weights in {self.name}.{name}; wrap the module in DistributedDataParallel, "
                    "which makes them equal, or seed all ranks alike before you build it"
                )
        is_on_cpu = all(each.device.type == "cpu" for each in parameters.values())
        if DTYPES[call.dtype] == torch.bfloat16 and not is_on_cpu and not has_bf16():
            say_once("recurrent layers are slow in bf16 until torch 2.11, whose cuDNN has it; update torch")

    def __deepcopy__(self, memo: object) -> None:
        """A copied layer has no region: copies are ordinary. (Those with torch's parametrizations keep their class.)"""
        self.check_copy()

    def check_copy(self) -> None:
        """Raise if the layers can't be copied or pickled, since other ranks have some."""
        if self.split is not None:
            raise ConfigError(
                f"{self.name} can't be copied or pickled, since this rank keeps only some of its layers: load "
                "stretto.full_state_dict(model) into a new module instead"
            )

    def num_ranks(self, layout: Layout) -> int:
        """Return how many ranks share this region in a layout."""
        return layout.num_ranks(is_bidirectional=self.is_bidirectional)

    def describe(self, layout: Layout) -> str:
        """Return what a layout means for this region."""
        return str(replace(layout, stages=1) if self.is_bidirectional else replace(layout, spans=1))

    def bind(self) -> Group | None:
        """Make the group of ranks that compare their calls, and return it. All ranks call this together."""
        assert dist.group.WORLD is not None
        self.is_local, self._group = False, self._ask_choice()
        self._num_calls = self._num_calls_of_one_step = 0
        self._world = weakref.ref(dist.group.WORLD)
        return self._group

    def _ask_choice(self) -> Group | None:
        try:
            if norm := self._batch_norm():
                say_once(f"{norm}: normalizes the rows of each rank by themselves, as with DDP; use nn.SyncBatchNorm")
            return self.choice.bind(self)
        except RuntimeError as error:
            raise MeshError(
                f"rank {dist.get_rank()} is at its first call of {self.name}, where all {dist.get_world_size()} ranks "
                f"make their groups, but they did not all come ({short_reason(error)}); {REMEDY}"
            ) from error

    def _stay_local_after_one_step_calls(self, longest: int) -> None:
        self._num_calls += 1
        self._num_calls_of_one_step += longest <= 1
        if self._num_calls_of_one_step == self._num_calls == _CALLS_OF_ONE_STEP:
            self.is_local = True
            say(f"{self.name}: local from now on, since each of its first {_CALLS_OF_ONE_STEP} calls had one time step")

    def _describe(self, number: int, layers: Layers, inputs: Inputs) -> Call:
        if inputs.dtype not in DTYPES:
            raise MeshError(f"{self.name} can't be computed in {inputs.dtype}; use one of {DTYPES}")
        optimizer_steps, timed_steps = self.choice.progress()
        return Call(
            region=self._index,
            number=number,
            is_backward=False,
            dtype=DTYPES.index(inputs.dtype),
            width=inputs.width,
            has_grad=torch.is_grad_enabled(),
            layouts=self.choice.checksum(self),
            num_rows=len(inputs.lengths),
            num_steps=inputs.num_steps,
            longest=inputs.longest,
            is_dense=inputs.is_dense,
            num_resets=len(inputs.resets),
            has_state=inputs.has_state,
            needs_grad=inputs.needs_grad,
            seed=layers.draw_seed(),
            optimizer_steps=optimizer_steps,
            timed_steps=timed_steps,
        )

    def _run_together(
        self, layers: Layers, inputs: Inputs, layout: Layout, group: Group, all_calls: Sequence[Call]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the values of this rank's rows, and their state after all layers, layer by layer."""
        members, own = group.members(self.num_ranks(layout)), all_calls[group.rank]
        calls = all_calls[members.start : members.stop]
        rows = CallRows(
            packing=self._pack(self._all_lengths(group, inputs, all_calls)[members.start : members.stop]),
            seeds=[each.seed for each in calls],
            resets=self._all_resets(group, inputs, all_calls)[members.start : members.stop],
            recompute=layout.recompute,
        )
        call = SharedCall(
            layout,
            group.messages(len(members)),
            rows,
            any(each.has_state for each in calls),
            any(each.needs_grad for each in calls),
            self.split,
            lambda: _agree_on_backward(group, own),
        )
        return run_spans(layers, inputs, call) if self.is_bidirectional else run_stages(layers, inputs, call)

    def _all_lengths(self, group: Group, inputs: Inputs, calls: Sequence[Call]) -> list[Tensor]:
        if all(call.is_dense for call in calls):
            return [torch.full((call.num_rows,), call.longest, dtype=torch.int64) for call in calls]
        return group.guard.gather_tensors(inputs.lengths, [call.num_rows for call in calls], calls)

    def _all_resets(self, group: Group, inputs: Inputs, calls: Sequence[Call]) -> list[Tensor]:
        if not any(call.num_resets for call in calls):
            return []
        gathered = group.guard.gather_tensors(inputs.resets.flatten(), [2 * call.num_resets for call in calls], calls)
        return [each.view(-1, 2) for each in gathered]

    def _pack(self, lengths: Sequence[Tensor]) -> Packing:
        """Return the packing of all rows; most calls have the lengths of the one before."""
        num_rows = [len(each) for each in lengths]
        packing = self._packing
        if packing is None or packing.num_rows != num_rows or not torch.equal(packing.lengths, torch.cat([*lengths])):
            packing = self._packing = Packing(lengths)
        return packing


def _agree_on_backward(group: Group, call: Call) -> None:
    group.guard.compare(Call(call.region, call.number, True, call.dtype, call.width, layouts=call.layouts))


def _nothing() -> None:
    return None
