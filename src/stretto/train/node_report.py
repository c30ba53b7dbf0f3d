"""NodeReport: what the ranks of one node measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NodeReport:
    """The time and memory of each rank of one node, over the steps since the last report. Its first rank has it."""

    step: int
    ranks: tuple[int, ...]  # the ranks of the node; the other fields have a figure for each of them
    seconds: tuple[float, ...]  # mean per step
    busy: tuple[float, ...]  # mean seconds per step spent on data, compute and the optimizer, not waiting
    waiting: tuple[float, ...]  # mean seconds per step spent waiting for other ranks
    data: tuple[float, ...]  # the part of `busy` spent waiting for data
    memory: tuple[int, ...]  # peak bytes so far, allocated on an accelerator or resident on the CPU
