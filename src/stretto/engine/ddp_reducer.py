"""DDP's reducer, driven by hand: what `DistributedDataParallel.forward` would do, for a step that never calls it.

The reducer is not documented: `Reducer._rebuild_buckets` and `Reducer.prepare_for_backward` are torch's own affair.
"""

from torch.nn.parallel import DistributedDataParallel


def prepare_for_backward(ddp: DistributedDataParallel) -> None:
    """Let the reducer reduce each bucket in the next backward, as soon as its gradients are there."""
    # An empty list: every parameter takes part, there are no unused ones to search for.
    ddp.reducer.prepare_for_backward([])


def rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Regroup the parameters in the order in which their gradients came, once that is known."""
    ddp.reducer._rebuild_buckets()
