"""A model with regularizers is exported as the plain model that it is in evaluations."""

from pathlib import Path

import torch

from helpers.layout_cases import NUM_TOKENS, regularized_model
from helpers.random_stacks import run_stack
from stretto.exchange import export_onnx, export_torch, from_torch
from stretto.nn import Stack


def test_regularizers_leave_no_trace_in_an_exported_model(tmp_path: Path) -> None:
    stack = Stack(regularized_model()).eval()
    exported = export_onnx(stack, tmp_path / "model.onnx")
    assert exported.inputs == ("x", "state.2.h", "state.2.c", "state.4.h", "state.4.c")
    assert exported.max_difference is not None and exported.max_difference <= 1e-5
    export_torch(stack, tmp_path / "model.safetensors")
    x = torch.randint(NUM_TOKENS, (7, 3))
    torch.testing.assert_close(run_stack(from_torch(tmp_path / "model.safetensors"), x), run_stack(stack, x))
