"""TF32 is off or on for all of CUDA's operations in fp32, and torch's settings are restored."""

import importlib
from collections.abc import Iterator

import pytest
import torch

from stretto.base.tf32 import fp32_precisions, set_tf32, use_tf32

EXACT, TF32 = dict.fromkeys(("matmul", "conv", "rnn"), "ieee"), dict.fromkeys(("matmul", "conv", "rnn"), "tf32")


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    with use_tf32(False):
        yield


def test_the_context_sets_all_operations_and_restores_them() -> None:
    set_tf32(True)
    assert fp32_precisions() == TF32
    with use_tf32(False):
        assert fp32_precisions() == EXACT
        with pytest.raises(ValueError, match="in the context"), use_tf32(True):
            assert fp32_precisions() == TF32
            raise ValueError("in the context")
        assert fp32_precisions() == EXACT
    assert fp32_precisions() == TF32


def test_torchs_own_flags_are_the_ones_that_are_set() -> None:
    for is_allowed, precision in ((True, "tf32"), (False, "ieee")):
        set_tf32(is_allowed)
        assert torch.backends.cuda.matmul.fp32_precision == precision
        assert torch.backends.cudnn.conv.fp32_precision == precision  # type: ignore[attr-defined]


def test_rnns_are_set_even_after_torch_has_imported_cudnns_rnn_module() -> None:
    # Torch does so when an RNN is moved to CUDA; in torch 2.10 that hides torch.backends.cudnn.rnn.fp32_precision.
    importlib.import_module("torch.backends.cudnn.rnn")
    set_tf32(True)
    assert fp32_precisions()["rnn"] == "tf32"


def test_settings_made_with_the_older_flags_are_restored() -> None:
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = True
    with use_tf32(False):
        assert fp32_precisions() == EXACT
    assert not torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_an_lstm_is_as_exact_as_on_the_cpu_without_tf32() -> None:
    lstm, x = torch.nn.LSTM(256, 256), torch.randn(20, 32, 256)
    expected, _ = lstm(x)
    lstm.cuda()
    with use_tf32(False):
        actual, _ = lstm(x.cuda())
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-5)
    if torch.cuda.get_device_capability() >= (8, 0):
        with use_tf32(True):
            rounded, _ = lstm(x.cuda())
        assert (rounded.cpu() - expected).abs().max() > 1e-5, "TF32 has 11 significant bits"
