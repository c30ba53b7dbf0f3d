"""Parse quantities on a command line: bytes such as 24GB, and links such as 5us,25GB/s."""

import re

from stretto.base.errors import ConfigError
from stretto.plan.profile import Link

_BYTES_PER_UNIT = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SECONDS_PER_UNIT = {"S": 1, "MS": 1e-3, "US": 1e-6}
_NUMBER = r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e-?[0-9]+)?)"  # such as 24, 1.5 or 3e-6


def parse_bytes(option: str, text: str) -> float:
    """Parse a size such as `24GB` or `40GiB`; return the number of bytes. An error names `option`."""
    match = re.fullmatch(rf"{_NUMBER} *([kmgt]i?)b", text.strip(), re.IGNORECASE)
    num_bytes = 0.0 if match is None else float(match[1]) * _BYTES_PER_UNIT[match[2].upper()]
    if not 1 <= num_bytes <= 1e18:  # more must be a typo
        raise ConfigError(f"{option}={text} is not a valid number with a unit; write it like 24GB")
    return num_bytes


def parse_link(option: str, text: str) -> Link:
    """Return the link that `5us,25GB/s` describes: its latency in seconds and its bandwidth in bytes per second."""
    latency, _, bandwidth = text.partition(",")
    match = re.fullmatch(rf"{_NUMBER} *(s|ms|us)", latency.strip(), re.IGNORECASE)
    if match is None or float(match[1]) > 1e6 or not bandwidth:  # 1e6 us is 1 s; more must be a typo
        raise ConfigError(f"{option}={text} is not a latency and a bandwidth; write it like 5us,25GB/s")
    seconds = float(match[1]) * _SECONDS_PER_UNIT[match[2].upper()]
    return Link(latency=seconds, bandwidth=parse_bytes(f"{option}={text}: bandwidth", bandwidth.removesuffix("/s")))
