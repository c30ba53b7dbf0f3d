"""Region: a recurrent layer whose work is shared by several ranks, each with rows of its own.

    my rows, all layers        all rows, my layers          my rows, all layers
      rank 0  x0  --+  swap   stage 0  wavefront     swap  +-- y0
      rank 1  x1  --+------->  stage 1  ........... ------>+-- y1
      rank 2  x2  --+         stage 2                      +-- y2

Everything here is differentiable, so the backward is the same from right to left.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.rnn import PackedSequence

from stretto.base.errors import MeshError
from stretto.parallel.groups import REGION_NAMES, Group, stage_group
from stretto.parallel.guard import DTYPES, Call
from stretto.parallel.layout import Layout
from stretto.parallel.rows import Packing, unpack
from stretto.parallel.stage import LayerDropout, RnnStage, compute_dtype, enter, layer_costs, state_widths
from stretto.parallel.wavefront import run_wavefront

_ROWS_PER_RANK = 1 << 32  # more than any rank has: the keys of rows of different ranks differ


class Region:
    """How one nn.LSTM, nn.GRU or nn.RNN is computed by the ranks of a group."""

    def __init__(self, rnn: nn.RNNBase, name: str, layout: Layout, mesh: DeviceMesh | None) -> None:
        layout.check(name, rnn.num_layers)
        self.name, self.layout, self.mesh = name, layout, mesh
        self._index = len(REGION_NAMES)
        REGION_NAMES.append(name)
        self._stages = layout.split(layer_costs(rnn))
        self._packing: Packing | None = None  # of the last call

    def __call__(self, rnn: nn.RNNBase, x: Any, hx: Any, plain: Any) -> Any:  # noqa: ANN401 - as nn.LSTM's
        """Do what `plain` does, the forward of torch's own class, for the rows of all ranks together."""
        group = stage_group(self.layout.num_stages, self.mesh)
        refused: Exception | None = None
        try:
            rows = _Input(rnn, x, hx)
        except Exception as error:  # noqa: BLE001 - the other ranks have to know first
            refused, rows = error, _Input.refused(rnn)
        calls = group.guard.compare(self._describe(group, rnn, rows, is_refused=refused is not None))
        if refused is not None:
            raise refused
        # A call is short if the longest row of all ranks is: all ranks decide alike.
        if max(call.longest for call in calls) < 2 * self.layout.chunks:
            return self._run_alone(rnn, rows, group, calls, plain, x, hx)
        y, state = self._run_together(rnn, rows, group, calls)
        return rows.as_output(y, state)

    def _describe(self, group: Group, rnn: nn.RNNBase, rows: "_Input", *, is_refused: bool) -> Call:
        seed = int(torch.randint(1 << 62, ())) if rnn.dropout and group.messages.rank == 0 else 0
        return Call(
            region=self._index,
            number=group.guard.next_number(self._index),
            is_backward=False,
            dtype=DTYPES.index(rows.dtype),
            width=rnn.input_size,
            num_rows=len(rows.lengths),
            longest=int(rows.lengths.max()) if len(rows.lengths) else 0,
            is_even=rows.is_even,
            has_state=rows.state is not None,
            is_refused=is_refused,
            seed=seed,
        )

    def _dropout(self, rnn: nn.RNNBase, calls: Sequence[Call], ranks: Sequence[int]) -> LayerDropout | None:
        """Return the dropout of a call, for the rows of these ranks of the group."""
        keys = [torch.arange(calls[rank].num_rows) + rank * _ROWS_PER_RANK for rank in ranks]
        return LayerDropout(rnn.dropout, calls[0].seed, torch.cat(keys)) if rnn.dropout else None

    def _run_alone(
        self,
        rnn: nn.RNNBase,
        rows: "_Input",
        group: Group,
        calls: Sequence[Call],
        plain: Any,  # noqa: ANN401
        x: Any,  # noqa: ANN401
        hx: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Compute this rank's rows on this rank, with the masks that a region would have."""
        if not rnn.dropout or not len(rows.lengths):
            return plain(rnn, x, hx)
        dropout = self._dropout(rnn, calls, [group.messages.rank])
        weights = [getattr(rnn, name) for names in rnn._all_weights for name in names]
        weights = [weight.to(rows.dtype) for weight in weights]
        stage = RnnStage(rnn, range(rnn.num_layers), weights, dropout, recompute=False)
        packing = Packing(rows.lengths)
        state = rows.state or rows.zero_state(rows.values, len(rows.lengths), range(rnn.num_layers))
        with torch.autocast(rows.values.device.type, enabled=False):
            order = packing.order.to(rows.values.device)
            steps = rows.values[packing.index.to(rows.values.device)]
            (chunk,) = packing.chunks(1)
            y, after = stage(steps, chunk, tuple(tensor[order] for tensor in state))
        place = packing.place.to(y.device)
        return rows.as_output(y[packing.back.to(y.device)], [tensor[place] for tensor in after])

    def _run_together(
        self, rnn: nn.RNNBase, rows: "_Input", group: Group, calls: Sequence[Call]
    ) -> tuple[Tensor, list[Tensor]]:
        messages, stages = group.messages, self._stages
        rank, last = messages.rank, messages.size - 1
        device, widths = rows.values.device, state_widths(rnn)
        lengths = self._all_lengths(group, rows, calls)
        num_rows, num_steps = [len(each) for each in lengths], [int(each.sum()) for each in lengths]
        packing = self._pack(torch.cat(lengths))
        chunks = packing.chunks(self.layout.chunks)
        input_width, output_width = rnn.input_size, rnn.proj_size or rnn.hidden_size

        # From rows to stages. The first stage gets the steps, each stage the state of its layers.
        has_state = any(call.has_state for call in calls)
        own_state: list[Tensor] = []
        if has_state:  # of any rank; otherwise each stage begins with zeros of its own
            own_state = rows.state or rows.zero_state(rows.values, len(rows.lengths), range(rnn.num_layers))
        of_stage = [slice(stage.start * len(widths), stage.stop * len(widths)) for stage in stages]
        state_shapes = [widths * len(stage) for stage in stages]
        give = [[rows.values] * (to == 0) + own_state[of_stage[to]] for to in range(last + 1)]
        take = [
            [(num_steps[source], input_width)] * (rank == 0)
            + [(num_rows[source], width) for width in state_shapes[rank]] * has_state
            for source in range(last + 1)
        ]
        token, weights = enter(rnn, messages.token(rows.values), stages[rank], rows.dtype)
        token, received = messages.swap(token, give, take, _nothing)
        order = packing.order.to(device)
        steps = torch.cat([parts.pop(0) for parts in received])[packing.index.to(device)] if rank == 0 else None
        if has_state:
            state = tuple(torch.cat(parts)[order] for parts in zip(*received, strict=True))
        else:
            state = tuple(rows.zero_state(rows.values, sum(num_rows), stages[rank]))

        dropout = self._dropout(rnn, calls, range(last + 1))
        stage = RnnStage(rnn, stages[rank], weights, dropout, recompute=self.layout.recompute)
        with torch.autocast(device.type, enabled=False):
            token, y, state = run_wavefront(stage, steps, state, chunks, messages, token, output_width)

        # From stages to rows.
        place = packing.place.to(device)
        states = [torch.split(tensor[place], num_rows) for tensor in state]
        outputs = (
            [[]] * (last + 1) if y is None else [[part] for part in torch.split(y[packing.back.to(device)], num_steps)]
        )
        give = [[*outputs[to], *(parts[to] for parts in states)] for to in range(last + 1)]
        take = [
            [(num_steps[rank], output_width)] * (source == last)
            + [(num_rows[rank], width) for width in state_shapes[source]]
            for source in range(last + 1)
        ]
        _, received = messages.swap(token, give, take, lambda: self._agree_on_backward(group, calls[rank]))
        return received[last].pop(0), [tensor for parts in received for tensor in parts]

    def _agree_on_backward(self, group: Group, call: Call) -> None:
        group.guard.compare(Call(call.region, call.number, True, call.dtype, call.width))

    def _all_lengths(self, group: Group, rows: "_Input", calls: Sequence[Call]) -> list[Tensor]:
        if all(call.is_even for call in calls):
            return [torch.full((call.num_rows,), call.longest, dtype=torch.int64) for call in calls]
        return group.guard.gather_lengths(rows.lengths, calls)

    def _pack(self, lengths: Tensor) -> Packing:
        """Return the packing of all rows; most calls have the lengths of the one before."""
        if self._packing is None or not torch.equal(self._packing.lengths, lengths):
            self._packing = Packing(lengths)
        return self._packing


def _nothing() -> None:
    """The backward's first message comes later: it is the last one of the forward."""


class _Input:
    """The rows of one call of an nn.LSTM, nn.GRU or nn.RNN, in order: steps [sum of lengths, width], and state."""

    def __init__(self, rnn: nn.RNNBase, x: Any, hx: Any) -> None:  # noqa: ANN401
        self._rnn, self._x = rnn, x
        self._widths = state_widths(rnn)
        packing: Packing | None = None
        if isinstance(x, PackedSequence):
            values, packing = unpack(x)
            self.lengths = packing.lengths
            rnn.check_input(x.data, x.batch_sizes)
        else:
            if x.dim() not in (2, 3):
                raise ValueError(f"{type(rnn).__name__}: expected input to be 2D or 3D, got {x.dim()}D instead")
            x = x.unsqueeze(0) if x.dim() == 2 else x if rnn.batch_first else x.transpose(0, 1)
            rnn.check_input(x, None)
            values = x.reshape(-1, x.shape[2])
            self.lengths = torch.full((x.shape[0],), x.shape[1], dtype=torch.int64)
        self._packing = packing
        self.is_even = packing is None or len(set(self.lengths.tolist())) <= 1
        self.dtype = compute_dtype(rnn, values)
        if self.dtype not in DTYPES:
            raise MeshError(f"{type(rnn).__name__} can't be computed in {self.dtype}; use one of {DTYPES}")
        self.values = values.to(self.dtype)
        self.state: list[Tensor] | None = None if hx is None else self._read_state(hx)

    @classmethod
    def refused(cls, rnn: nn.RNNBase) -> "_Input":
        """Return an input without rows, in place of one that was refused."""
        weight = getattr(rnn, rnn._all_weights[0][0])
        return cls(
            rnn, weight.detach().new_empty((0, 1, rnn.input_size) if rnn.batch_first else (1, 0, rnn.input_size)), None
        )

    def _read_state(self, hx: Any) -> list[Tensor]:  # noqa: ANN401
        """Return the state of all layers, layer by layer: tensors [rows, width]."""
        parts = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        if len(parts) != len(self._widths):
            raise ValueError(
                f"{type(self._rnn).__name__}: expected {len(self._widths)} state tensors, got {len(parts)}"
            )
        state = []
        for part, width in zip(parts, self._widths, strict=True):
            part = part.unsqueeze(1) if self._is_unbatched else part
            expected = (self._rnn.num_layers, len(self.lengths), width)
            if part.shape != expected:
                raise RuntimeError(
                    f"{type(self._rnn).__name__}: expected a state of size {expected}, got {tuple(part.shape)}"
                )
            state.append(part.to(self.dtype))
        return [part[layer] for layer in range(self._rnn.num_layers) for part in state]

    @property
    def _is_unbatched(self) -> bool:
        return isinstance(self._x, Tensor) and self._x.dim() == 2

    def zero_state(self, like: Tensor, num_rows: int, layers: range) -> list[Tensor]:
        return [like.new_zeros(num_rows, width) for _ in layers for width in self._widths]

    def as_output(self, y: Tensor, state: Sequence[Tensor]) -> Any:  # noqa: ANN401
        """Return what torch's class returns, for steps and state in order of rows."""
        count = len(self._widths)
        hx = tuple(torch.stack(list(state[index::count])) for index in range(count))
        output: Any = y
        if self._packing is not None:
            data = y[self._packing.index.to(y.device)]
            output = PackedSequence(data, self._x.batch_sizes, self._x.sorted_indices, self._x.unsorted_indices)
        elif self._is_unbatched:
            hx = tuple(part.squeeze(1) for part in hx)
        else:
            output = y.view(len(self.lengths), self._x.shape[1 if self._rnn.batch_first else 0], y.shape[1])
            output = output if self._rnn.batch_first else output.transpose(0, 1)
        return output, hx if count == 2 else hx[0]
