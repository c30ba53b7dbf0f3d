"""Region: a recurrent layer whose work is shared by several ranks, each with rows of its own.

A call: the ranks compare what they are about to do (`guard`), choose a layout from that (`choice`, `tune`), and compute
the layer alone, in stages or in spans. All of this is differentiable, so the backward is the same from end to start.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.rnn import PackedSequence

from stretto.base.errors import ConfigError, MeshError
from stretto.base.reason import short_reason
from stretto.parallel.groups import REGION_NAMES, Group, say, say_once
from stretto.parallel.guard import DTYPES, REMEDY, Call
from stretto.parallel.inputs import Inputs, SharedCall
from stretto.parallel.layout import Layout, Layouts
from stretto.parallel.rows import Packing
from stretto.parallel.spans import SpanSweep, run_spans
from stretto.parallel.stage import LayerDropout, RnnStage
from stretto.parallel.stages import run_stages

Forward = Callable[..., Any]
"""The forward of torch's own class."""

_CALLS_OF_ONE_STEP = 50  # in a row from the first one: of a decoder's loop
_ROWS_PER_RANK = 1 << 32  # more than any rank has: seed + row differs for rows of different ranks


class Choice(Protocol):
    """What the regions of a module ask."""

    def bind(self, region: "Region") -> Group | None:
        """Return the ranks that compare their calls, or None if none will be shared. All ranks call this together."""

    def choose(self, region: "Region", rnn: nn.RNNBase, inputs: Inputs, group: Group, calls: Sequence[Call]) -> Layout:
        """Return the layout of a call, for which every rank of the group has the same `calls`."""

    def progress(self) -> tuple[int, int]:
        """Return how many optimizer steps this rank has taken, and of how many it knows the time."""

    def layouts(self, region: "Region") -> Layouts:
        """Return what has been decided for a region."""

    def checksum(self, region: "Region") -> int:
        """Return a number that is another one for other choices."""


class Region:
    """How one nn.LSTM, nn.GRU or nn.RNN is computed by the ranks of a group."""

    def __init__(
        self,
        rnn: nn.RNNBase,
        name: str,
        choice: Choice,
        mesh: DeviceMesh | None = None,
        batch_norm: Callable[[], str] = str,  # the name of a submodule of the same module that mixes rows
    ) -> None:
        self.name, self.choice, self.mesh, self._batch_norm = name, choice, mesh, batch_norm
        self.num_layers, self.is_bidirectional = rnn.num_layers, rnn.bidirectional
        self.is_local = False  # for good: no message any more
        self._index = len(REGION_NAMES)
        REGION_NAMES.append(name)
        self._group: Group | None = None  # the ranks that compare their calls
        self._is_checked = False  # whether they have the same weights
        self._world: Callable[[], dist.ProcessGroup | None] = _nothing  # that it is in
        self._num_calls = self._num_calls_of_one_step = 0
        self._packing: Packing | None = None  # of the last call
        self.has_shared = False  # whether ranks have computed a call together

    def __call__(self, rnn: nn.RNNBase, x: Any, hx: Any, plain: Forward) -> Any:  # noqa: ANN401 - as nn.LSTM's
        """Do what `plain` does, alone or together with the ranks of the group."""
        if not torch.is_grad_enabled():  # a reentrant checkpoint calls it again with gradients, and together
            return self._run_alone(rnn, x, hx, plain)
        if self._world() is not dist.group.WORLD:  # the first call, or the process group was made anew
            assert dist.group.WORLD is not None
            self.is_local, self._is_checked, self._group = False, False, self._bind()
            self._num_calls = self._num_calls_of_one_step = 0
            self._world = weakref.ref(dist.group.WORLD)
        if self._group is None or self.is_local:
            return self._run_alone(rnn, x, hx, plain)
        refused: Exception | None = None
        try:
            inputs = Inputs(rnn, x, hx)
        except Exception as error:  # noqa: BLE001 - the other ranks have to know first
            refused, inputs = error, Inputs.refused(rnn)
        own = self._describe(self._group, rnn, inputs, is_refused=refused is not None)
        calls = self._group.guard.compare(own)
        if refused is not None:
            raise refused
        if not self._is_checked:
            self._check_weights(rnn, self._group, own)
        layout = self.choice.choose(self, rnn, inputs, self._group, calls)
        self._stay_local_after_one_step_calls(max(call.longest for call in calls))
        if self.num_ranks(layout) == 1:
            return self._run_alone(rnn, x, hx, plain, own.seed)
        self.has_shared = True
        y, state = self._run_together(rnn, inputs, layout, self._group, calls)
        return inputs.as_output(y, state)

    def _check_weights(self, rnn: nn.RNNBase, group: Group, call: Call) -> None:
        """Raise on all ranks if they have different weights: each computes a part for the rows of all."""
        # Parameters only: what a module sets before each call, such as dropped weights, may differ.
        parameters = dict(rnn.named_parameters())
        sums = torch.tensor([float(each.detach().double().sum()) for each in parameters.values()], dtype=torch.float64)
        for name, *values in zip(parameters, *group.guard.gather(sums.view(torch.int64).tolist(), call), strict=True):
            if len({*values}) > 1:
                raise ConfigError(
                    f"ranks have different weights in {self.name}.{name}; wrap the module in DistributedDataParallel, "
                    "which makes them equal, or seed all ranks alike before you build it"
                )
        self._is_checked = True

    def __deepcopy__(self, memo: object) -> None:
        """A copied layer has no region: copies are ordinary. (Those with torch's parametrizations keep their class.)"""

    def num_ranks(self, layout: Layout) -> int:
        """Return how many ranks share this region in a layout."""
        return layout.num_ranks(is_bidirectional=self.is_bidirectional)

    def describe(self, layout: Layout) -> str:
        """Return what a layout means for this region."""
        return str(replace(layout, stages=1) if self.is_bidirectional else replace(layout, spans=1))

    def _bind(self) -> Group | None:
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

    def _describe(self, group: Group, rnn: nn.RNNBase, inputs: Inputs, *, is_refused: bool) -> Call:
        optimizer_steps, timed_steps = self.choice.progress()
        return Call(
            region=self._index,
            number=group.guard.next_number(self._index),
            is_backward=False,
            dtype=DTYPES.index(inputs.dtype),
            width=rnn.input_size,
            layouts=self.choice.checksum(self),
            num_rows=len(inputs.lengths),
            num_steps=inputs.num_steps,
            longest=inputs.longest,
            is_dense=inputs.is_dense,
            has_state=inputs.state is not None,
            needs_grad=inputs.needs_grad,
            is_refused=is_refused,
            seed=_draw_seed(rnn),
            optimizer_steps=optimizer_steps,
            timed_steps=timed_steps,
        )

    def _run_alone(self, rnn: nn.RNNBase, x: Any, hx: Any, plain: Forward, seed: int | None = None) -> Any:  # noqa: ANN401
        """Compute this rank's rows on this rank, with the dropout that a shared call would have."""
        if isinstance(x, PackedSequence) and not len(x.batch_sizes):  # torch's class wants a row, DDP all gradients
            y, state = plain(
                rnn, x.data.view((0, 1, rnn.input_size) if rnn.batch_first else (1, 0, rnn.input_size)), hx
            )
            return PackedSequence(y.flatten(0, 1), *x[1:]), state
        if not rnn.dropout or not (inputs := Inputs(rnn, x, hx)).num_steps:
            return plain(rnn, x, hx)
        packing, weights = Packing([inputs.lengths]), [getattr(rnn, name) for each in rnn._all_weights for name in each]
        weights = [weight.to(inputs.dtype) for weight in weights]
        dropout = LayerDropout.of_rows(rnn.dropout, [_draw_seed(rnn) if seed is None else seed], packing)
        steps = packing.pack([inputs.values(is_even=packing.is_even)])
        with torch.autocast(inputs.device.type, enabled=False):
            y, state = run_layers(rnn, weights, dropout, packing, steps, inputs.all_state())
        return inputs.as_output(packing.unpack(y)[0], state)

    def _run_together(
        self, rnn: nn.RNNBase, inputs: Inputs, layout: Layout, group: Group, all_calls: Sequence[Call]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the values of this rank's rows, and their state after all layers, layer by layer."""
        members = group.members(self.num_ranks(layout))
        lengths = self._all_lengths(group, inputs, all_calls)[members.start : members.stop]
        calls, own = all_calls[members.start : members.stop], all_calls[group.rank]
        call = SharedCall(
            layout,
            group.messages(len(members)),
            self._pack(lengths),
            [each.seed for each in calls],
            any(each.has_state for each in calls),
            any(each.needs_grad for each in calls),
            lambda: _agree_on_backward(group, own),
        )
        return run_spans(rnn, inputs, call) if rnn.bidirectional else run_stages(rnn, inputs, call)

    def _all_lengths(self, group: Group, inputs: Inputs, calls: Sequence[Call]) -> list[Tensor]:
        if all(call.is_dense for call in calls):
            return [torch.full((call.num_rows,), call.longest, dtype=torch.int64) for call in calls]
        return group.guard.gather_lengths(inputs.lengths, calls)

    def _pack(self, lengths: Sequence[Tensor]) -> Packing:
        """Return the packing of all rows; most calls have the lengths of the one before."""
        num_rows = [len(each) for each in lengths]
        packing = self._packing
        if packing is None or packing.num_rows != num_rows or not torch.equal(packing.lengths, torch.cat([*lengths])):
            packing = self._packing = Packing(lengths)
        return packing


def run_layers(
    rnn: nn.RNNBase,
    weights: Sequence[Tensor],
    dropout: LayerDropout | None,
    packing: Packing,
    steps: Tensor,
    state: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """Compute all layers on one rank; return the steps, in packed order too, and the state."""
    if rnn.bidirectional:
        sweep = SpanSweep(rnn, weights, [packing], [dropout] if dropout else [])
        _, (y,), after = sweep.run(steps.new_zeros(()), [steps], state, (0, 1), (0, 1))
        return y, after
    stage = RnnStage(rnn, range(rnn.num_layers), weights, dropout, recompute=False)
    y, new = stage(steps, packing.chunks(1)[0], tuple(packing.sort_rows([tensor]) for tensor in state))
    return y, [packing.unsort_rows(tensor)[0] for tensor in new]


def _agree_on_backward(group: Group, call: Call) -> None:
    group.guard.compare(Call(call.region, call.number, True, call.dtype, call.width, call.layouts))


def _draw_seed(rnn: nn.RNNBase) -> int:
    """Return the seed of dropout for this rank's rows: in every layout the same, and another one on each rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return int(torch.randint(1 << 62, ())) + rank * _ROWS_PER_RANK if rnn.dropout else 0


def _nothing() -> None:
    return None
