"""The [sentinel] section: what a run watches for besides failures, such as weights that change silently."""

from pydantic import Field

from stretto.base.strict_model import StrictModel


class SentinelConfig(StrictModel):
    """What a run watches for: ranks that compute wrong numbers, or slowly. You can change it on resume."""

    hash_every: int | None = Field(None, ge=1)
    """Steps between comparisons of the weights and optimizer state of the ranks that hold the same blocks (replicas,
    spans), by checksums that each computes on its device; they are also compared before each save. If they differ, the
    run names the rank and restarts from the last checkpoint. With exactly two copies, each rank keeps another copy of
    both in its memory, to replay the steps since the last comparison. By default never."""
    straggler: float = Field(10.0, gt=0, allow_inf_nan=False)
    """A rank is reported as a straggler if it costs all others this percentage of each step, in three reports in a row
    (one every `run.log_every` steps). At least three replicas are needed."""
