"""The Triton kernel of dropout, in Triton's interpreter on a CPU: it drops the same features as torch's operations."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stretto.nn import Dropout, LockedDropout, Rows

pytest.importorskip("triton", reason="Triton is not available for this platform")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.long
@pytest.mark.short
@pytest.mark.skipif(IS_INTERPRETED, reason="this is the process that it starts")
def test_the_kernel_in_tritons_interpreter() -> None:
    """Run this file's tests and those of the blocks with the kernel; Triton reads the variable when it is imported."""
    tests = [str(Path(__file__).with_name(name)) for name in ("test_fused_dropout.py", "test_dropout.py")]
    # Without the property-based test, which takes the interpreter half a minute.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not any_cut", *tests]
    result = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(not IS_INTERPRETED, reason="runs in the process that the test above starts")
@pytest.mark.parametrize("kind", [Dropout, LockedDropout])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 3, 130), (5, 20, 2, 9)], ids=str)
def test_values_and_gradients_equal_those_of_torchs_operations(
    kind: type[Dropout | LockedDropout],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stretto.blocks import dropout

    block, x = kind(0.3), torch.randn(shape).to(dtype)
    rows = Rows.of(shape[1], key=2**61 + 5)
    results = []
    for is_fused in (True, False):
        monkeypatch.setattr(dropout, "has_kernel", lambda x, is_fused=is_fused: is_fused)
        leaf = x.clone().requires_grad_()
        _, state = block(leaf, block.begin(rows))
        y, _ = block(leaf, state)  # a second chunk: time goes on
        torch.autograd.backward([y], [torch.ones_like(y)])
        assert leaf.grad is not None
        results.append((y.detach(), leaf.grad))
    # The interpreter truncates to bf16, while torch and GPUs round to the nearest value.
    rtol = 2**-7 if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(results[0], results[1], rtol=rtol, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", [Dropout, LockedDropout])
def test_a_gpu_drops_the_same_features_as_a_cpu(kind: type[Dropout | LockedDropout]) -> None:
    block, x = kind(0.3), torch.randn(9, 33, 257)
    expected, _ = block(x, block.begin(Rows.of(33, key=7)))
    y, _ = block(x.cuda(), block.begin(Rows.of(33, key=7, device=torch.device("cuda"))))
    assert torch.equal(y.cpu(), expected)
