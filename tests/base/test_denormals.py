import sys

import torch

from stretto.base.denormals import flush_denormals


def test_denormals_are_zero_within_and_as_they_were_after() -> None:
    smallest = torch.tensor(sys.float_info.min, dtype=torch.float64)
    for was_set in (False, True):
        torch.set_flush_denormal(was_set)
        try:
            with flush_denormals():
                assert smallest / 2 == 0
            assert (smallest / 2 == 0) == was_set
        finally:
            torch.set_flush_denormal(False)
