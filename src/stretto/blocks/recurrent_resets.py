"""How LSTM and GRU blocks run a chunk with resets: a loop of our own on a CPU, packed sequences elsewhere.

Packed, each episode is a row of its own, and all run in one call, longest first; torch computes no padding:

    row 0   a  a  a |b  b                 a  a  a
    row 1   c  c |d  d  d      becomes    d  d  d       batch sizes 4, 4, 2
                                          b  b
                                          c  c

cuDNN is made for this; on a CPU, torch's packed sequences take 2 to 7 times as long as unpacked ones.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from stretto.base.device_copy import to_device
from stretto.base.resets import Resets
from stretto.base.state import State
from stretto.blocks.cast_weights import is_plain
from stretto.blocks.reset_scan import gru_scan, lstm_scan


def can_scan(rnn: nn.RNNBase, x: Tensor) -> bool:
    """Return whether a module can run in our own loop."""
    return x.device.type == "cpu" and not torch.is_autocast_enabled("cpu") and is_plain(rnn) and not rnn.proj_size


def scan(rnn: nn.RNNBase, x: Tensor, state: State, resets: Resets) -> tuple[Tensor, State]:
    """Run the layers of a module over a chunk; the state after it is that before any reset at its end.

    States are `[batch, layers, features]`.
    """
    ends = resets.ends
    has_end = ends.any(1).tolist()
    kept = (~ends).to(x.dtype).unsqueeze(2)
    keep = [None, *(kept[step] if has_end[step] else None for step in range(len(ends) - 1))]
    after: list[list[Tensor]] = []
    for layer in range(rnn.num_layers):
        suffix = f"l{layer}"
        weight, recurrent = getattr(rnn, f"weight_ih_{suffix}"), getattr(rnn, f"weight_hh_{suffix}")
        bias, recurrent_bias = (getattr(rnn, f"bias_{kind}_{suffix}", None) for kind in ("ih", "hh"))
        before = [tensor[:, layer] for tensor in state]
        if isinstance(rnn, nn.LSTM):
            h, c = before
            gates = nn.functional.linear(x, weight, None if bias is None else bias + recurrent_bias)
            x, c = lstm_scan(gates, h, c, keep, recurrent)
            after.append([x[-1], c])
        else:
            gates = nn.functional.linear(x, weight, bias)
            zeros = recurrent.new_zeros(len(recurrent)) if recurrent_bias is None else recurrent_bias
            x = gru_scan(gates, before[0], keep, recurrent, zeros)
            after.append([x[-1]])
    return x, tuple(torch.stack(tensors, dim=1) for tensors in zip(*after, strict=True))


@dataclass(frozen=True)
class Episodes:
    """The episodes of a chunk as the rows of a packed sequence."""

    batch_sizes: Tensor  # int64 [longest episode], on the CPU
    positions: Tensor  # int64 [time * batch]: where the packed data has each time step of the chunk
    num_episodes: int
    first: Tensor  # int64 [batch]: the packed row of each row's first episode
    last: Tensor  # int64 [batch]: and of its last

    @classmethod
    def of(cls, ends: Tensor, device: torch.device) -> "Episodes":
        """Find the episodes that end at `ends`, bool [time, batch], or with the chunk."""
        num_steps, num_rows = ends.shape
        is_start = torch.ones(num_rows, num_steps, dtype=torch.bool)
        is_start[:, 1:] = ends[:-1].t()
        episode = is_start.flatten().cumsum(0).sub(1).view(num_rows, num_steps)  # of each time step, by rows
        lengths = episode.flatten().bincount()
        order = lengths.argsort(descending=True, stable=True)
        rank = order.argsort()
        batch_sizes = (lengths > torch.arange(int(lengths.max())).unsqueeze(1)).sum(1)
        starts = torch.where(is_start, torch.arange(num_steps), 0).cummax(1).values
        offsets = batch_sizes.cumsum(0) - batch_sizes
        positions = offsets[torch.arange(num_steps) - starts] + rank[episode]
        tensors = (positions.t().flatten(), rank[episode[:, 0]], rank[episode[:, -1]])
        positions, first, last = (to_device(tensor.contiguous(), device) for tensor in tensors)
        return cls(batch_sizes, positions, len(lengths), first, last)

    def pack(self, x: Tensor) -> PackedSequence:
        """Return a chunk's inputs, `[time, batch, features]`, as a packed sequence."""
        flat = x.flatten(0, 1)
        return PackedSequence(torch.empty_like(flat).index_copy(0, self.positions, flat), self.batch_sizes)

    def unpack(self, packed: PackedSequence, num_rows: int) -> Tensor:
        """Return packed outputs as `[time, batch, features]`."""
        flat = packed.data.index_select(0, self.positions)
        return flat.view(-1, num_rows, flat.shape[1])

    def spread_state(self, tensor: Tensor) -> Tensor:
        """Return the state of all episodes from that of the rows: zero for each that is not its row's first."""
        return tensor.new_zeros(self.num_episodes, *tensor.shape[1:]).index_copy(0, self.first, tensor)

    def last_state(self, tensor: Tensor) -> Tensor:
        """Return the state of the rows, which is that of their last episode, from that of all episodes."""
        return tensor.index_select(0, self.last)
