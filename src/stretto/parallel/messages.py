"""Messages of a region, both differentiable: `swap` (every rank to every rank) and `shift` (to neighbors).

Each takes a token and returns one. The token has no value: it makes each message depend on the one before. So autograd
runs the backward messages once each, in exactly the reverse order, on every rank, whichever outputs a rank's loss uses.

Why nothing deadlocks, also under NCCL, where a rank runs its messages in the order of the calls and each waits for its
partner: a schedule numbers its slots alike on all ranks, and all messages of a rank in a slot are one batch. The rule
is that what is sent in slot s is received in slot s. Then the batch of slot s waits only for the neighbors' batches of
slot s, and these only for earlier slots. The backward is the same with the slots in reverse.

Each message has a new tensor. Autograd keeps those of the forward anyway; under NCCL (`recordStream`), those of the
backward are reused when the device has passed them: together, a step's are no more than those of the forward.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Shape = Sequence[int]
Hook = Callable[[], None]


def _nothing() -> None:
    return None


class Messages:
    """The messages of a group of ranks. Ranks are numbered within the group: 0 has the first stage."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self._sends: list[tuple[dist.Work, Tensor]] = []  # under way, with what they send

    def swap(
        self,
        token: Tensor,
        give: Sequence[Sequence[Tensor]],
        take: Sequence[Sequence[Shape]],
        before_backward: Hook = _nothing,
    ) -> tuple[Tensor, list[list[Tensor]]]:
        """Give rank r the tensors `give[r]`, and take tensors of the shapes `take[r]` from it: one all-to-all.

        `before_backward` is called before the message of the backward.
        """
        shapes = [[tensor.shape for tensor in tensors] for tensors in give]
        tensors = [tensor for tensors in give for tensor in tensors]
        token, *received = _Swap.apply(token, self, shapes, take, before_backward, *tensors)  # type: ignore[no-untyped-call]
        parts = iter(received)
        return token, [[next(parts) for _ in shapes] for shapes in take]

    def shift(
        self, token: Tensor, sends: Sequence[tuple[int, Tensor]], takes: Sequence[tuple[int, Shape]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Send a tensor to each (rank, tensor), and take one from each (rank, shape): one slot of a schedule."""
        if not sends and not takes:
            return token, []
        peers = [(rank, tensor.shape) for rank, tensor in sends]
        token, *received = _Shift.apply(token, self, peers, takes, *(tensor for _, tensor in sends))  # type: ignore[no-untyped-call]
        return token, received

    def all_to_all(
        self,
        tensors: Sequence[Tensor],
        given: Sequence[Sequence[Shape]],
        taken: Sequence[Sequence[Shape]],
        like: Tensor,
    ) -> list[Tensor]:
        """Exchange tensors of these shapes by rank."""
        for work, _ in self._sends:  # their tensors can go
            work.wait()
        self._sends.clear()
        given_sizes, taken_sizes = ([sum(map(prod, shapes)) for shapes in each] for each in (given, taken))
        sent, received = like.new_empty(sum(given_sizes)), like.new_empty(sum(taken_sizes))
        for part, tensor in zip(_parts(sent, given), tensors, strict=True):
            part.copy_(tensor)
        dist.all_to_all_single(received, sent, taken_sizes, given_sizes, group=self.group)
        return _parts(received, taken)

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], takes: Sequence[tuple[int, Shape]], like: Tensor
    ) -> list[Tensor]:
        """Send and receive the messages of a slot; wait for those that are received."""
        received = [like.new_empty(*shape) for _, shape in takes]
        ops = [
            dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=rank)
            for (rank, _), tensor in zip(takes, received, strict=True)
        ]
        ops += [
            dist.P2POp(dist.isend, tensor.contiguous(), group=self.group, group_peer=rank) for rank, tensor in sends
        ]
        works = dist.batch_isend_irecv(ops)
        if len(works) < len(ops):  # NCCL has one for a batch of several; waiting for it blocks its stream only
            for work in works:
                work.wait()
            return received
        for op, work in zip(ops, works, strict=True):
            if op.op is dist.isend:
                self._sends.append((work, op.tensor))
            else:
                work.wait()
        return received


def _parts(flat: Tensor, shapes: Sequence[Sequence[Shape]]) -> list[Tensor]:
    """Return the memory of a flat tensor as tensors that autograd takes for separate ones: users may change them."""
    parts, start = [], 0
    for shape in (shape for of_rank in shapes for shape in of_rank):
        part = flat.new_empty(0)
        parts.append(part.set_(flat.untyped_storage(), start, shape, _strides(shape)))
        start += prod(shape)
    return parts


def _strides(shape: Shape) -> list[int]:
    return [prod(shape[index + 1 :]) for index in range(len(shape))]


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        token: Tensor,
        messages: Messages,
        given: Sequence[Sequence[Shape]],
        taken: Sequence[Sequence[Shape]],
        before_backward: Hook,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.messages, ctx.given, ctx.taken, ctx.before_backward = messages, given, taken, before_backward
        # For torch.utils.checkpoint: it computes a region again when a saved tensor is first read, up to the last one
        # that was saved. Both are this one, on every rank.
        ctx.save_for_backward(token)
        return token.clone(), *messages.all_to_all(tensors, given, taken, token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        ctx.saved_tensors  # noqa: B018 - read first
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a region has no second derivative (create_graph=True): compute it on a copy of the module, which "
                "copy.deepcopy makes an ordinary one"
            )
        token, *received = gradients
        ctx.before_backward()
        return token, None, None, None, None, *ctx.messages.all_to_all(received, ctx.taken, ctx.given, token)


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        token: Tensor,
        messages: Messages,
        peers: Sequence[tuple[int, Shape]],
        takes: Sequence[tuple[int, Shape]],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.messages, ctx.peers, ctx.takes = messages, peers, takes
        sends = [(rank, tensor) for (rank, _), tensor in zip(peers, tensors, strict=True)]
        return token.clone(), *messages.exchange(sends, takes, token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        token, *received = gradients
        sends = [(rank, gradient) for (rank, _), gradient in zip(ctx.takes, received, strict=True)]
        return token, None, None, None, *ctx.messages.exchange(sends, ctx.peers, token)
