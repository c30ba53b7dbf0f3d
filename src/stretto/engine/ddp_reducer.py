"""The calls that `DistributedDataParallel.forward` makes to its reducer, for training steps that don't call `forward`.

The reducer is not a public API: `Reducer._rebuild_buckets` and `Reducer.prepare_for_backward` are undocumented.
"""

from torch.nn.parallel import DistributedDataParallel


def prepare_for_backward(ddp: DistributedDataParallel) -> None:
    """Let the reducer all-reduce each bucket during the next backward, as soon as its gradients are ready."""
    # As DDP does with find_unused_parameters=False: the reducer waits for every parameter.
    ddp.reducer.prepare_for_backward([])


def rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Regroup the parameters by when their gradients became ready in the first backward; later calls change nothing."""
    ddp.reducer._rebuild_buckets()
