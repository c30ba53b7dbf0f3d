"""Batches of messages on the strict backend: one operation, as under NCCL."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from stretto.mesh.strict import _MESSAGE_TAG, _READY_TAG, StrictWork


def use_strict_batches() -> None:
    """Make batches of this process one operation each; torch would post the messages one after another."""
    dist.batch_isend_irecv = _post_batch  # type: ignore[assignment]


def _post_batch(ops: Sequence[Any]) -> list[StrictWork]:
    group = ops[0].group

    def exchange(tag: int, *, is_turned: bool = False) -> None:
        """Exchange one number or, with the message's tag, the messages; `is_turned`: from receivers to senders."""
        works = []
        for op in ops:
            move = group._gloo.recv if (op.op is dist.irecv) != is_turned else group._gloo.send
            works.append(move([op.tensor if tag == _MESSAGE_TAG else torch.zeros(1)], op.group_peer, tag))
        for work in works:
            work.wait()

    def run() -> None:
        exchange(_READY_TAG, is_turned=True)
        exchange(_MESSAGE_TAG)

    for peer in sorted({op.group_peer for op in ops} - group._connected):
        group._connect(peer, 0)
    return [group._post(run, [op.tensor for op in ops])]
