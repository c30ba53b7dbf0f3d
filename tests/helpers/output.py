"""The output of processes that use torch.distributed."""

import re


def without_gloo_lines(text: str) -> str:
    """Drop the lines that Gloo prints about its connections, in torch 2.10 but not in later versions."""
    return re.sub(r"^\[Gloo\] Rank \d+ is connected to .*\n", "", text, flags=re.MULTILINE)
