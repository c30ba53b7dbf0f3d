"""What an exported model's metadata says about decoding: a graph gives scores, and its caller decodes them."""

from typing import Any

from stretto.base.task import Task, has_own_length
from stretto.blocks.crf import CRF
from stretto.blocks.ctc import CTCLoss
from stretto.blocks.stack import Stack


def decoding_metadata(stack: Stack, task: Task | None) -> dict[str, Any] | None:
    """Return how to decode the outputs of a stack that was trained with CTC or a CRF; None for others.

    `task` is that of the data that it was trained on, if it is known.
    """
    loss = stack.loss
    if isinstance(loss, CRF):
        weights = {name: getattr(loss, name).detach().cpu().tolist() for name in ("transitions", "start", "end")}
        return {"kind": "crf", **weights}
    if isinstance(loss, CTCLoss):
        return {"kind": "ctc", "blank": loss.blank}
    return {"kind": "ctc", "blank": 0} if task is not None and has_own_length(task.targets) else None
