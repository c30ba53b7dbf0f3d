"""Published figures of GPUs and links, and what is not published. docs/concepts/when-it-pays.md has every source."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

Interval = tuple[float, float]

PRECISIONS = {"fp32": 4, "tf32": 4, "bf16": 2}
"""The bytes of a number in matrix products and messages."""


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet."""

    flops: Mapping[str, float]  # per second, dense, by precision
    bandwidth: float  # of memory, bytes per second
    cache: float  # bytes of L2
    link: str  # to the other GPUs of its node


GPUS = {
    "A100": Gpu({"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12}, 2.039e12, 40e6, "nvlink3"),
    "H100": Gpu({"fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12}, 3.35e12, 50e6, "nvlink4"),
    "L40S": Gpu({"fp32": 91.6e12, "tf32": 183e12, "bf16": 362e12}, 0.864e12, 96e6, "pcie4"),
}

LINKS: dict[str, tuple[Interval, Interval]] = {
    "nvlink3": ((3e-6, 17e-6), (80e9, 300e9)),
    "nvlink4": ((3e-6, 17e-6), (80e9, 450e9)),
    "pcie4": ((7.6e-6, 14.1e-6), (13e9, 32e9)),
    "network": ((9e-6, 34e-6), (12.5e9, 48e9)),
}
"""The latency of a message between two GPUs, in seconds, and the bytes per second in one direction."""


@dataclass(frozen=True)
class Assumption:
    """One guess at everything that only a measurement can tell; times are in seconds."""

    launch: float  # a time step of a cell takes at least this long
    reached: float  # the share of the peak that matrix products reach
    cached: float  # how many times as fast weights are read if all that are in use fit in L2
    latency: float  # of a message
    bandwidth: float  # of a link, bytes per second
    host: float  # the host starts a chunk's forward or backward no sooner than this after the one before
    guard: float  # of an exchange of the order guard that the device waits for


def assumptions(link: str) -> list[Assumption]:
    """Return all combinations of the ends of what is unknown."""
    hosts = ((0.20e-3, 0.0), (0.44e-3, 1.3e-3))
    ends = product((3e-6, 8e-6), (0.25, 0.75), (1.0, 4.6), *LINKS[link])
    return [Assumption(*others, *host) for others in ends for host in hosts]
