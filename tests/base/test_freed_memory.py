"""Freed memory stays with the process: a block that is allocated again has no page faults."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc can be configured")

# Larger blocks than this are never kept by default; each has 16,384 pages.
_SCRIPT = """
import resource, torch
from stretto import make_engine
from stretto.base.freed_memory import return_freed_memory
from stretto.nn import CrossEntropy, Linear, Stack

def num_faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

by_default = num_faults(4)
make_engine(Stack([Linear(2, 2)]), CrossEntropy(), seed=1)
num_faults(6)
kept, before = num_faults(4), resident_bytes()
return_freed_memory(torch.device("cpu"))
print(by_default, kept, before - resident_bytes())
"""


def _run_script(**environment: str) -> list[int]:
    """Return the page faults of four blocks by default and with an engine, and the bytes that were returned at last."""
    return [
        int(text)
        for text in subprocess.run(
            [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, env=os.environ | environment
        ).stdout.split()
    ]


def test_a_process_with_an_engine_keeps_the_memory_it_frees_until_it_is_asked_to_return_it() -> None:
    by_default, kept, returned = _run_script()
    assert by_default > 60_000
    assert kept < 1_000
    assert returned > 60e6


def test_the_user_may_configure_malloc() -> None:
    _, kept, _ = _run_script(MALLOC_TRIM_THRESHOLD_="1000000")
    assert kept > 60_000
