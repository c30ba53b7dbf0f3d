"""Sessions: streaming inference for many named streams, batched into few calls to the model.

      sessions   a  b  c  d        chunks of 5, 3, 3 and 1 time steps: each call runs until the next chunk ends
step 0           ■  ■  ■  ■        one call
steps 1, 2       ■  ■  ■           one call
steps 3, 4       ■                 one call
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stretto.base.errors import ConfigError, LawError
from stretto.base.state import State, detach
from stretto.base.window import Rows
from stretto.blocks.head_loss import class_outputs
from stretto.blocks.input_spec import block_input_spec
from stretto.blocks.stack import Stack

SessionName = TypeVar("SessionName", bound=Hashable)

_MIN_GROWTH = 16  # add at least this many slots when all are taken


class Sessions:
    """Named streams for one model. `feed` takes the next time steps of any of them and returns their outputs.

    A session starts with the first chunk fed under its name and continues until it is closed. Chunk by chunk, it gives
    the same outputs as one call on the whole stream. Its state has a fixed size, however long the stream is.

    If the model makes one output of several time steps, those that are not complete wait for the next chunk, or for
    `finish`.
    """

    def __init__(self, stack: Stack) -> None:
        if not stack.causal:
            raise LawError("the model has a block that looks ahead in time (causal=False); sessions need causal blocks")
        self._stack = stack.eval()
        self._device = stack.device
        # Each tensor has a row (slot) per session, and free rows. `feed` reads the rows it needs and writes them back.
        self._pool: State = self._initial_state(0)
        self._slots: dict[Hashable, int] = {}
        self._free_slots: list[int] = []
        # Of models with a stride: each session's inputs that no output was made of yet.
        self._waiting: dict[Hashable, Tensor] = {}
        self._input_spec = block_input_spec(stack)
        self._no_outputs: Tensor | None = None  # outputs of 0 time steps, once their shape is known

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._slots

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._slots)

    @torch.no_grad()
    def feed(self, chunks: Mapping[SessionName, Tensor]) -> dict[SessionName, Tensor]:
        """Run each session's chunk, tokens `[time]` or values `[time, features]`; return the outputs by session.

        Chunks may differ in length. If one of them is invalid, no session changes.
        """
        if not chunks:
            return {}
        _check_chunks(chunks)
        return self._run(chunks) if self._stack.stride == 1 else self._run_groups(chunks)

    @torch.no_grad()
    def finish(self, name: Hashable) -> Tensor:
        """End a session; return the last output, of the time steps that waited for more, or outputs of 0 time steps."""
        if name not in self._slots:
            raise ConfigError(f"session {name!r} does not exist; feed it first")
        waiting = self._waiting.get(name)
        y = self._run({name: waiting})[name] if waiting is not None and len(waiting) else self._empty_outputs(waiting)
        self.close(name)
        return y

    def _run_groups(self, chunks: Mapping[SessionName, Tensor]) -> dict[SessionName, Tensor]:
        """Run the time steps that make whole outputs; keep the rest."""
        stride = self._stack.stride
        for name, chunk in chunks.items():
            self._check_waiting(name, chunk, self._waiting.get(name))
        inputs = {
            name: torch.cat([self._waiting[name].to(chunk), chunk]) if name in self._waiting else chunk
            for name, chunk in chunks.items()
        }
        num_run = {name: len(chunk) // stride * stride for name, chunk in inputs.items()}
        outputs = self._run({name: chunk[: num_run[name]] for name, chunk in inputs.items() if num_run[name]})
        outputs |= {name: self._empty_outputs(chunk) for name, chunk in chunks.items() if name not in outputs}
        new_names = [name for name in inputs if name not in self._slots]
        if new_names:
            self._store_states(new_names, self._initial_state(len(new_names)))
        self._waiting |= {name: chunk[num_run[name] :].clone() for name, chunk in inputs.items()}
        return {name: outputs[name] for name in chunks}

    def _empty_outputs(self, example: Tensor | None) -> Tensor:
        """Return outputs of 0 time steps, in a tensor of their own; `example` has the shape of a session's inputs."""
        if self._no_outputs is None:
            spec = self._input_spec
            if example is not None:
                x = example.new_zeros(1, 1, *example.shape[1:], device=self._device)
            elif spec is not None:
                x = torch.zeros(1, 1, *spec.shape, device=self._device)
                x = x.long() if spec.num_tokens is not None else x
            else:
                return torch.empty(0, dtype=self._stack.dtype, device=self._device)
            y, _ = self._stack(x.to(self._stack.dtype) if x.is_floating_point() else x, self._initial_state(1))
            self._no_outputs = class_outputs(self._stack.loss, y)[:0, 0].clone()
        return self._no_outputs.clone()

    def _check_waiting(self, name: Hashable, inputs: Tensor, waiting: Tensor | None = None) -> None:
        """Raise unless a session's inputs are such as the model takes, and such as those that wait."""
        actual = f"time steps of shape {list(inputs.shape[1:])} and dtype {inputs.dtype}"
        spec = self._input_spec
        if spec is not None and (
            inputs.is_floating_point() != (spec.num_tokens is None) or inputs.shape[1:][-1:] != spec.shape[-1:]
        ):
            kind = f"features of shape {list(spec.shape)}" if spec.num_tokens is None else "tokens"
            raise ConfigError(f"session {name!r} has {actual}, but the model takes {kind}; use such inputs")
        if waiting is not None and (waiting.shape[1:], waiting.is_floating_point()) != (
            inputs.shape[1:],
            inputs.is_floating_point(),
        ):
            raise ConfigError(
                f"session {name!r} has {actual}, unlike the chunk before, whose last time steps have shape "
                f"{list(waiting.shape[1:])} and dtype {waiting.dtype}; use the same for all chunks"
            )

    def _run(self, chunks: Mapping[SessionName, Tensor]) -> dict[SessionName, Tensor]:
        """Run each session's chunk from its state."""
        if not chunks:
            return {}
        # Longest first, so that the rows that continue are a prefix of the batch.
        names = sorted(chunks, key=lambda name: -len(chunks[name]))
        lengths = [len(chunks[name]) for name in names]
        inputs = pad_sequence([chunks[name] for name in names]).to(self._device)
        if inputs.is_floating_point():
            inputs = inputs.to(self._stack.dtype)
        state = self._gather_states(names)
        outputs: list[Tensor] = []
        for start, stop in pairwise([0, *sorted(set(lengths))]):
            num_rows = sum(length >= stop for length in lengths)
            y, next_state = self._stack(inputs[start:stop, :num_rows], tuple(tensor[:num_rows] for tensor in state))
            # torch.cat copies: the returned state may be a view of the given one.
            state = tuple(torch.cat([value, old[num_rows:]]) for value, old in zip(next_state, state, strict=True))
            outputs.append(class_outputs(self._stack.loss, y))
        self._store_states(names, state)
        if self._no_outputs is None:
            self._no_outputs = outputs[0][:0, 0].clone()
        # Concatenate each row's outputs from all calls that it was part of.
        return {name: torch.cat([y[:, row] for y in outputs if row < y.shape[1]]) for row, name in enumerate(names)}

    def state(self, name: Hashable) -> State:
        """Return a copy of a session's state, as a batch of one row, for `restore`."""
        if name not in self._slots:
            raise ConfigError(f"session {name!r} does not exist; feed it first")
        slot = self._slots[name]
        waiting = [self._waiting[name].unsqueeze(0).clone()] if name in self._waiting else []
        return *(tensor[slot : slot + 1].clone() for tensor in self._pool), *waiting

    @torch.no_grad()
    def restore(self, name: Hashable, state: State) -> None:
        """Set a new or existing session to what `state` returned, in this or another `Sessions` of the same model."""
        expected = [[1, *tensor.shape[1:]] for tensor in self._pool]
        # A model with a stride may have one more tensor: inputs that wait.
        has_waiting = self._stack.stride > 1 and len(state) == len(expected) + 1
        actual = [list(tensor.shape) for tensor in state]
        if actual[: len(state) - has_waiting] != expected:
            raise ConfigError(
                f"the state for session {name!r} has shapes {actual}, not {expected}; use a state of the same model"
            )
        waiting = state[-1] if has_waiting else None
        if waiting is not None:
            if waiting.dim() < 2 or len(waiting) != 1 or waiting.shape[1] >= self._stack.stride:
                raise ConfigError(
                    f"the state for session {name!r} ends with inputs of shape {list(waiting.shape)}, not [1, time, "
                    f"...] with less than {self._stack.stride} time steps; use a state of the same model"
                )
            self._check_waiting(name, waiting[0])
        state = state[: len(expected)]
        self._store_states([name], tuple(tensor.to(pool) for tensor, pool in zip(state, self._pool, strict=True)))
        self._waiting.pop(name, None)
        if waiting is not None:
            self._waiting[name] = waiting[0].clone()

    def close(self, name: Hashable) -> None:
        """End a session if it exists. Its name can then start a new one."""
        if name in self._slots:
            self._free_slots.append(self._slots.pop(name))
            self._waiting.pop(name, None)

    def _initial_state(self, num_rows: int) -> State:
        return detach(self._stack.initial_state(Rows.of(num_rows, device=self._device, dtype=self._stack.dtype)))

    def _gather_states(self, names: Sequence[Hashable]) -> State:
        """Return copies of the states of some sessions; new sessions get the initial state."""
        existing = [index for index, name in enumerate(names) if name in self._slots]
        state = tuple(tensor.clone() for tensor in self._initial_state(len(names)))
        if existing:
            rows = torch.tensor(existing, device=self._device)
            slots = self._slot_indices([names[index] for index in existing])
            for tensor, pool in zip(state, self._pool, strict=True):
                tensor[rows] = pool[slots]
        return state

    def _store_states(self, names: Sequence[Hashable], state: State) -> None:
        """Write the states of some sessions to the pool; new sessions take free slots."""
        new_names = [name for name in names if name not in self._slots]
        num_missing = len(new_names) - len(self._free_slots)
        if num_missing > 0:
            # Double the capacity: a million sessions that start one by one cause fewer than twenty copies.
            capacity = len(self._slots) + len(self._free_slots)
            num_added = max(num_missing, capacity, _MIN_GROWTH)
            self._pool = tuple(torch.cat(pair) for pair in zip(self._pool, self._initial_state(num_added), strict=True))
            self._free_slots.extend(reversed(range(capacity, capacity + num_added)))
        for name in new_names:
            self._slots[name] = self._free_slots.pop()
        slots = self._slot_indices(names)
        for pool, tensor in zip(self._pool, state, strict=True):
            pool[slots] = tensor

    def _slot_indices(self, names: Sequence[Hashable]) -> Tensor:
        return torch.tensor([self._slots[name] for name in names], device=self._device)


def _check_chunks(chunks: Mapping[SessionName, Tensor]) -> None:
    expected: tuple[torch.Size, bool] | None = None
    for name, chunk in chunks.items():
        if chunk.dim() == 0 or len(chunk) == 0:
            raise ConfigError(f"the chunk of session {name!r} has no time steps; give it shape [time, ...], or omit it")
        actual = (chunk.shape[1:], chunk.is_floating_point())
        expected = expected or actual
        if actual != expected:
            raise ConfigError(
                f"the chunk of session {name!r} has time steps of shape {list(actual[0])} and dtype {chunk.dtype}, "
                "unlike the first chunk; use the same for all chunks"
            )
