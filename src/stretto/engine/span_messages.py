"""SpanMessages: the states and gradients that a span exchanges with its neighbors, one message per action."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.base.state import State
from stretto.mesh.channel import Channel
from stretto.mesh.mesh import Mesh
from stretto.plan.actions import Action, ActionKind
from stretto.plan.span_schedule import SpanGrid

_ALIGNMENT = 16  # bytes; a tensor's bytes start at a multiple of its item size


@dataclass(frozen=True)
class StateSpec:
    """The shapes of a state's tensors, without their rows, and their dtypes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, state: State) -> "StateSpec":
        """Return the spec of a state."""
        return cls(tuple(tuple(tensor.shape[1:]) for tensor in state), tuple(tensor.dtype for tensor in state))

    @property
    def gradient(self) -> "StateSpec":
        """The spec of the gradients: integers have none."""
        pairs = [pair for pair in zip(self.shapes, self.dtypes, strict=True) if pair[1].is_floating_point]
        return StateSpec(tuple(shape for shape, _ in pairs), tuple(dtype for _, dtype in pairs))

    def num_bytes(self, num_rows: int) -> int:
        """Return the size of a message; one without tensors, of a state that has no floats, is not empty either."""
        return max(_ALIGNMENT, sum(_padded(size) for size in self._sizes(num_rows)))

    def pack(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the bytes of all tensors, as one message."""
        if not self.shapes:
            return torch.zeros(_ALIGNMENT, dtype=torch.uint8, device=device)
        parts = []
        for tensor, dtype in zip(tensors, self.dtypes, strict=True):
            part = tensor.detach().to(dtype).contiguous().view(-1).view(torch.uint8)
            parts += [part, part.new_empty(_padded(len(part)) - len(part))]
        return torch.cat(parts)

    def unpack(self, message: Tensor, num_rows: int) -> State:
        """Return views of the tensors in a message."""
        tensors, start = [], 0
        for shape, dtype, size in zip(self.shapes, self.dtypes, self._sizes(num_rows), strict=True):
            tensors.append(message[start : start + size].view(dtype).view(num_rows, *shape))
            start += _padded(size)
        return tuple(tensors)

    def _sizes(self, num_rows: int) -> list[int]:
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return [num_rows * math.prod(shape) * dtype.itemsize for shape, dtype in pairs]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class SpanMessages:
    """This span's messages of one step, in both directions. `span_order` says when each call is made.

    A neighbor sends its messages in the order of its own schedule, in which they may be needed here in another order.
    Those that are not needed yet are kept.
    """

    def __init__(
        self,
        mesh: Mesh,
        grid: SpanGrid,
        schedules: Sequence[Sequence[Action]],
        specs: Sequence[StateSpec],
        rows_per_span: Sequence[Sequence[int]],
    ) -> None:
        self._mesh, self._grid, self._specs = mesh, grid, specs  # a spec for each sweep
        self._rows_per_span = rows_per_span  # of each micro-batch
        self._expected: dict[int, Iterator[Action]] = {}
        self._arrived: dict[Action, State] = {}
        self._unsent: tuple[Channel, Tensor] | None = None  # the message of the action that has just run
        for neighbor in (mesh.span - 1, mesh.span + 1):
            if 0 <= neighbor < mesh.num_spans:
                actions = [action for action in schedules[neighbor] if grid.receiver(action, neighbor) == mesh.span]
                self._expected[neighbor] = iter(actions)
                self._channel(neighbor, is_sender=True).set_buffers(self._buffers(actions, neighbor))

    def prepare(self, neighbors: Sequence[int]) -> None:
        """Create a buffer for the next message of each of these neighbors, before it is sent; with gloo, receive it."""
        for neighbor in neighbors:
            self._channel(neighbor, is_sender=True).prepare_receive()

    def post(self, neighbor: int) -> None:
        """Post the receive of a neighbor's next message."""
        self._channel(neighbor, is_sender=True).post_receive()

    def pack(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Take what the receiver of an action needs: the state after a forward, the gradient of one in a backward."""
        receiver = self._grid.receiver(action, self._mesh.span)
        if receiver is None:
            return
        num_rows = self._num_rows(action, receiver)
        message = self._spec(action).pack([tensor[:num_rows] for tensor in tensors], self._mesh.world.device)
        self._unsent = self._channel(receiver, is_sender=False), message

    def send(self) -> None:
        """Send the message of the action that has just run."""
        assert self._unsent is not None
        (channel, message), self._unsent = self._unsent, None
        channel.send(message)

    def receive(self, action: Action) -> State | None:
        """Return what an action needs of its sender, of as many rows as it has; None if it has no sender."""
        sender = self._grid.sender(action, self._mesh.span)
        if sender is None:
            return None
        while action not in self._arrived:
            expected = next(self._expected[sender])
            kind = "state" if expected.kind is ActionKind.FORWARD else "gradient"
            message = self._channel(sender, is_sender=True).receive(f"the {kind} of {expected}")
            self._arrived[expected] = self._spec(expected).unpack(message, self._num_rows(expected, sender))
        return self._arrived.pop(action)

    def flush(self) -> None:
        """Wait until all messages have been sent."""
        for neighbor in self._expected:
            self._channel(neighbor, is_sender=False).flush()

    def _buffers(self, actions: Sequence[Action], neighbor: int) -> Iterator[Tensor]:
        device = self._mesh.world.device
        for action in actions:
            num_bytes = self._spec(action).num_bytes(self._num_rows(action, neighbor))
            yield torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def _spec(self, action: Action) -> StateSpec:
        spec = self._specs[action.chunk]
        return spec if action.kind is ActionKind.FORWARD else spec.gradient

    def _num_rows(self, action: Action, neighbor: int) -> int:
        """Return the number of rows in a message of two spans: those that the later one has."""
        return self._rows_per_span[action.micro_batch][max(self._mesh.span, neighbor)]

    def _channel(self, neighbor: int, *, is_sender: bool) -> Channel:
        """Return the channel of the messages from a neighbor, or to it."""
        is_rightward = (neighbor < self._mesh.span) == is_sender
        channel = self._mesh.forward_channel if is_rightward else self._mesh.backward_channel
        assert channel is not None
        return channel
