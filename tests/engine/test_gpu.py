"""The layout law on accelerators: `torchrun --nproc-per-node 2 -m pytest -m gpu tests/engine`, if you have some."""

import os

import pytest
import torch

from helpers.layout_cases import Case, run_case, run_single_device
from stretto import Layout, world
from stretto.base.tf32 import use_tf32

SIZE = int(os.environ.get("WORLD_SIZE", "1"))


@pytest.mark.gpu
@pytest.mark.skipif(torch.accelerator.device_count() < SIZE, reason="needs an accelerator for each rank")
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_ranks_on_accelerators_equal_the_cpu() -> None:
    case = Case(dtype=torch.float32)
    alone = run_single_device(case)
    # An engine keeps torch's settings, and by default cuDNN's RNNs use TF32.
    with use_tf32(False), world(SIZE) as joined:
        for layout in (Layout(stages=SIZE, chunks=4), Layout(replicas=SIZE, micro_batches=2)):
            result = run_case(joined, case, layout)
            # A different device sums in a different order; fp32 has 24 bits.
            assert result.losses == pytest.approx(alone.losses, rel=1e-4)
