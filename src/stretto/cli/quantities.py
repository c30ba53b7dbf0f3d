"""Parse quantities on a command line: bytes such as 24GB, and links such as 5us,25GB."""

import re

from stretto.base.errors import ConfigError
from stretto.plan.profile import Link

_BYTES_PER_UNIT = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SECONDS_PER_UNIT = {"S": 1, "MS": 1e-3, "US": 1e-6}


def parse_bytes(option: str, text: str) -> float:
    """Return the number of bytes of `24GB` or `40GiB`; an error names `option`."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?) *([kmgt]i?)b", text.strip(), re.IGNORECASE)
    value = _number(match.group(1)) if match else None
    if not match or not value or value > 1e18:
        raise ConfigError(f"{option}={text} is not a number of bytes; write it like 24GB")
    return value * _BYTES_PER_UNIT[match.group(2).upper()]


def parse_link(option: str, text: str) -> Link:
    """Return the link that `5us,25GB` describes: its latency, and its bandwidth in bytes per second."""
    latency, _, bandwidth = text.partition(",")
    match = re.fullmatch(r"([0-9.]+(?:e-?[0-9]+)?) *(s|ms|us)", latency.strip(), re.IGNORECASE)
    value = _number(match.group(1)) if match else None
    if not match or value is None or value > 1e6 or not bandwidth:
        raise ConfigError(f"{option}={text} is not a latency and a bandwidth; write it like 5us,25GB")
    seconds = value * _SECONDS_PER_UNIT[match.group(2).upper()]
    return Link(latency=seconds, bandwidth=parse_bytes(option, bandwidth.removesuffix("/s")))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
