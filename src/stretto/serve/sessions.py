"""Sessions: streams that are fed a chunk at a time, each from where it stopped, many in one call of the network.

         names   a  b  c  d        lengths 5, 3, 3, 1; those that are longer go on alone: the chunk law
steps 0          ■  ■  ■  ■        one call
steps 1, 2       ■  ■  ■           one call
steps 3, 4       ■                 one call
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stretto.base.errors import ConfigError, LawError
from stretto.base.state import State, detach
from stretto.base.window import Rows
from stretto.blocks.stack import Stack

SessionName = TypeVar("SessionName", bound=Hashable)


class Sessions:
    """Streams of one model by name. `feed` takes some steps of any of them, and gives back the outputs of just these.

    A session begins with the first chunk that is fed under its name and goes on until it is closed: fed chunk by chunk
    it gives what the whole would have given. What it remembers has a fixed size, however long it has been going.
    """

    def __init__(self, stack: Stack) -> None:
        if not stack.causal:
            raise LawError(
                "the model has a block that looks ahead in time (causal=False); a session needs causal blocks"
            )
        self._stack = stack.eval()
        self._device = stack.device
        # One tensor a state for all sessions: a feed picks its rows out of it and puts them back.
        self._pool: State = self._initial_state(0)
        self._slots: dict[Hashable, int] = {}
        self._free_slots: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._slots

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._slots)

    @torch.no_grad()
    def feed(self, chunks: Mapping[SessionName, Tensor]) -> dict[SessionName, Tensor]:
        """Run each session over its next steps, `[steps]` of tokens or `[steps, features]`; return their outputs.

        Chunks may differ in length. If anything is wrong with one of them, none is taken.
        """
        if not chunks:
            return {}
        _check_chunks(chunks)
        # The longest first, so that those which go on stay side by side.
        names = sorted(chunks, key=lambda name: -len(chunks[name]))
        lengths = [len(chunks[name]) for name in names]
        inputs = pad_sequence([chunks[name] for name in names]).to(self._device)
        if inputs.is_floating_point():
            inputs = inputs.to(self._stack.dtype)
        state = self._gather_states(names)
        outputs: list[Tensor] = []
        start = 0
        for stop in sorted(set(lengths)):
            num_rows = sum(length >= stop for length in lengths)
            y, after = self._stack(inputs[start:stop, :num_rows], tuple(tensor[:num_rows] for tensor in state))
            # New tensors: what came back may be a view of what went in.
            state = tuple(torch.cat([value, own[num_rows:]]) for value, own in zip(after, state, strict=True))
            outputs.append(y)
            start = stop
        self._store_states(names, state)
        return dict(zip(names, _split_rows(outputs, lengths), strict=True))

    def state(self, name: Hashable) -> State:
        """Return what a session remembers, of one row: to be kept, moved elsewhere, or given to another session."""
        if name not in self._slots:
            raise ConfigError(f"there is no session {name!r}; feed it first")
        slot = self._slots[name]
        return tuple(tensor[slot : slot + 1].clone() for tensor in self._pool)

    @torch.no_grad()
    def restore(self, name: Hashable, state: State) -> None:
        """Let a session go on from a state that `state` gave, here or in another process with the same model."""
        expected = [list(tensor.shape[1:]) for tensor in self._pool]
        found = [list(tensor.shape[1:]) for tensor in state]
        if found != expected or any(len(tensor) != 1 for tensor in state):
            raise ConfigError(
                f"a state of {found} for session {name!r} is not of this model, whose states are {expected}"
            )
        self._store_states([name], tuple(tensor.to(own) for tensor, own in zip(state, self._pool, strict=True)))

    def close(self, name: Hashable) -> None:
        """End a session; its name begins anew when it is fed again."""
        if name in self._slots:
            self._free_slots.append(self._slots.pop(name))

    def _initial_state(self, num_rows: int) -> State:
        return detach(self._stack.initial_state(Rows.of(num_rows, device=self._device, dtype=self._stack.dtype)))

    def _gather_states(self, names: Sequence[Hashable]) -> State:
        """Return copies of the states of some sessions, new ones at their beginning."""
        known = [index for index, name in enumerate(names) if name in self._slots]
        state = tuple(tensor.clone() for tensor in self._initial_state(len(names)))
        if known:
            rows = torch.tensor(known, device=self._device)
            slots = self._slot_indices([names[index] for index in known])
            for tensor, pool in zip(state, self._pool, strict=True):
                tensor[rows] = pool[slots]
        return state

    def _store_states(self, names: Sequence[Hashable], state: State) -> None:
        new = [name for name in names if name not in self._slots]
        missing = len(new) - len(self._free_slots)
        if missing > 0:
            # At least twice the room, so that a million sessions that come one by one are copied twenty times.
            before = len(self._slots) + len(self._free_slots)
            num_more = max(missing, before, 16)
            self._pool = tuple(torch.cat(pair) for pair in zip(self._pool, self._initial_state(num_more), strict=True))
            self._free_slots.extend(reversed(range(before, before + num_more)))
        for name in new:
            self._slots[name] = self._free_slots.pop()
        slots = self._slot_indices(names)
        for pool, tensor in zip(self._pool, state, strict=True):
            pool[slots] = tensor

    def _slot_indices(self, names: Sequence[Hashable]) -> Tensor:
        return torch.tensor([self._slots[name] for name in names], device=self._device)


def _check_chunks(chunks: Mapping[SessionName, Tensor]) -> None:
    kind: tuple[torch.Size, bool] | None = None
    for name, chunk in chunks.items():
        if chunk.dim() == 0 or len(chunk) == 0:
            raise ConfigError(f"the chunk of session {name!r} has no steps; give [steps, ...], or leave it out")
        found = (chunk.shape[1:], chunk.is_floating_point())
        kind = kind or found
        if found != kind:
            raise ConfigError(
                f"the chunk of session {name!r} has steps of {list(found[0])} {chunk.dtype}, unlike the others; "
                "give all of them the same"
            )


def _split_rows(outputs: Sequence[Tensor], lengths: Sequence[int]) -> Iterator[Tensor]:
    """Return each row's outputs, put together from the calls it was part of."""
    for index, length in enumerate(lengths):
        parts, seen = [], 0
        for y in outputs:
            if seen == length:
                break
            parts.append(y[:, index])
            seen += len(y)
        yield torch.cat(parts) if len(parts) > 1 else parts[0].clone()
