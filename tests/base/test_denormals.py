import sys

import torch

from stretto.base.denormals import flush_denormals


def test_denormals_are_flushed_within_the_context_and_the_setting_is_restored() -> None:
    smallest = torch.tensor(sys.float_info.min, dtype=torch.float64)
    for was_set in (False, True):
        torch.set_flush_denormal(was_set)
        try:
            with flush_denormals():
                assert smallest / 2 == 0
            assert (smallest / 2 == 0) == was_set
        finally:
            torch.set_flush_denormal(False)
