"""Freed memory stays with the process: a block that is allocated again has no page faults."""

import os
import platform
import resource
import subprocess
import sys

import pytest
import torch

from stretto.base import freed_memory
from stretto.base.freed_memory import keep_freed_memory

_CPU = torch.device("cpu")
_BLOCK_PAGES = 2**26 // resource.getpagesize()
# Blocks of 64 MiB: by default, glibc never keeps a block above 32 MiB. With huge pages there would be few page faults.
_SCRIPT = """
import ctypes, resource, torch
from stretto import make_engine
from stretto.base.freed_memory import release_freed_memory
from stretto.nn import CrossEntropy, Linear, Stack

PR_SET_THP_DISABLE = 41
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0

def num_faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

by_default = num_faults(4)
make_engine(Stack([Linear(2, 2)]), CrossEntropy(), seed=1)
num_faults(6)  # it takes some blocks until one is kept that is large enough, whatever its alignment
kept, before = num_faults(4), resident_bytes()
release_freed_memory(torch.device("cpu"))
print(by_default, kept, before - resident_bytes())
"""


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)


def _has_new_glibc() -> bool:
    name, version = platform.libc_ver()
    return name == "glibc" and tuple(map(int, version.split("."))) >= (2, 35)


@pytest.mark.skipif(not _has_new_glibc(), reason="only glibc 2.35 and newer can keep blocks of 64 MiB")
def test_a_process_with_an_engine_keeps_the_memory_it_frees_until_it_releases_it() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    by_default, kept, released = map(int, done.stdout.split())
    assert by_default >= 4 * _BLOCK_PAGES
    assert kept < _BLOCK_PAGES / 10
    assert released >= 0.9 * 2**26


class _Libc:
    """Records the calls of `mallopt`, and accepts thresholds up to a limit, as glibc before 2.35 does."""

    def __init__(self, limit: int = 2**62) -> None:
        self.limit = limit
        self.calls: list[tuple[int, int]] = []

    def mallopt(self, parameter: int, value: int) -> int:
        self.calls.append((parameter, value))
        return int(value <= self.limit)


def _calls(monkeypatch: pytest.MonkeyPatch, libc: _Libc, device: torch.device = _CPU) -> list[tuple[int, int]]:
    monkeypatch.setattr(freed_memory, "_libc_function", lambda name: getattr(libc, name))
    keep_freed_memory(device)
    return libc.calls


def test_an_older_glibc_keeps_smaller_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _calls(monkeypatch, _Libc()) == [(-3, 2**30), (-1, -1)]
    assert _calls(monkeypatch, _Libc(2**25)) == [(-3, 2**30), (-3, 2**25), (-1, -1)]


def test_a_process_that_computes_on_a_gpu_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _calls(monkeypatch, _Libc(), torch.device("cuda")) == []


def test_another_c_library_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "_libc_function", lambda name: None)
    keep_freed_memory(_CPU)
    freed_memory.release_freed_memory(_CPU)


@pytest.mark.parametrize("name", ["TRIM_THRESHOLD", "MMAP_THRESHOLD", "MMAP_MAX", "TOP_PAD"])
def test_the_user_may_configure_malloc(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"MALLOC_{name}_", "1000000")
    assert _calls(monkeypatch, _Libc()) == []


def test_only_tunables_of_malloc_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
    assert _calls(monkeypatch, _Libc())
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.pthread.rseq=0:glibc.malloc.top_pad=1000")
    assert _calls(monkeypatch, _Libc()) == []
