"""Warnings are errors in all tests except those marked `gpu`, whose warnings nobody has seen yet."""

import subprocess
import sys
import warnings

import pytest


@pytest.mark.gpu
def test_a_warning_is_only_shown() -> None:
    warnings.warn("RNN module weights are not part of single contiguous chunk of memory", stacklevel=1)


@pytest.mark.long
def test_a_warning_does_not_fail_a_test_marked_gpu() -> None:
    test = f"{__file__}::{test_a_warning_is_only_shown.__name__}"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", test]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "1 passed, 1 warning" in done.stdout, done.stdout
    with pytest.raises(UserWarning):
        test_a_warning_is_only_shown()
