"""A check of an exported ONNX model: onnxruntime and torch run on the same inputs, chunk by chunk."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from stretto.base.errors import ConfigError
from stretto.base.extras import import_optional_dependency
from stretto.base.reason import short_reason
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.input_spec import InputSpec
from stretto.blocks.stack import Stack
from stretto.exchange.onnx_blocks import state_names

Session = Any  # onnxruntime has no types

# (rows, chunk lengths). The export's example has 3 rows and 5 time steps; if it fixed these sizes, the check fails.
_TEST_SHAPES = ((1, (1, 7)), (2, (13, 1, 4)), (7, (3, 29)))


def compare_with_onnxruntime(stack: Stack, path: Path, input_spec: InputSpec) -> float | None:
    """Return the largest difference between torch's and onnxruntime's outputs or states; None without onnxruntime.

    The difference is absolute, or relative to torch's largest absolute value if that exceeds 1; infinite if shapes
    differ. Each side passes its own state from chunk to chunk.
    """
    if find_spec("onnxruntime") is None:
        return None
    session = _open_session(path)
    generator = Generator().manual_seed(1)
    differences = [0.0]
    for num_rows, chunk_lengths in _TEST_SHAPES:
        row_lengths = torch.randint(1, sum(chunk_lengths) + 1, (num_rows,), generator=generator)
        # If a stack looks ahead, its input can't be cut in time: run it as one chunk.
        chunks = chunk_lengths if stack.causal else (sum(chunk_lengths),)
        differences += _differences(stack, session, input_spec, chunks, row_lengths, generator)
    # np.max returns NaN if there is one; Python's max may ignore it.
    return float(np.max(differences))


def _differences(
    stack: Stack, session: Session, spec: InputSpec, chunks: tuple[int, ...], row_lengths: Tensor, generator: Generator
) -> list[float]:
    """Return the differences of each chunk's output and state; `chunks` has the number of time steps of each."""
    num_rows = len(row_lengths)
    rows = Rows.of(num_rows, dtype=torch.float32)
    if not stack.causal or stack.stride > 1:
        rows = replace(rows, lengths=row_lengths)
    names = state_names(stack)
    state = stack.initial_state(rows)
    onnx_state = {name: tensor.numpy() for name, tensor in _named_tensors(names, state).items()}
    output_names = [value.name for value in session.get_outputs()]
    differences = []
    for num_steps in chunks:
        x = spec.random_input(num_steps, num_rows, generator)
        with torch.no_grad():
            y, state = stack(x, state)
        outputs = dict(zip(output_names, _run_session(session, {"x": x.numpy(), **onnx_state}), strict=True))
        onnx_state = {name: outputs[f"{name}.next"] for name in onnx_state}
        differences.append(_difference(y, outputs["y"]))
        differences += [_difference(tensor, onnx_state[name]) for name, tensor in _named_tensors(names, state).items()]
    return differences


def _named_tensors(names: list[str | None], state: State) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in zip(names, state, strict=True) if name is not None}


def _difference(expected: Tensor, actual: NDArray[Any]) -> float:
    values = expected.numpy()
    if values.shape != actual.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        return float(np.abs(values.astype(np.float64) - actual).max() / max(1.0, np.abs(values).max()))


def _open_session(path: Path) -> Session:
    runtime = import_optional_dependency("onnxruntime", "onnx", "a check of an ONNX model")
    try:
        return runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - onnxruntime's errors have no common class
        raise ConfigError(
            f"onnxruntime can't open {path.name} ({short_reason(error)}); export it again with a newer onnxruntime"
        ) from None


def _run_session(session: Session, inputs: dict[str, Any]) -> list[NDArray[Any]]:
    try:
        outputs: list[NDArray[Any]] = session.run(None, inputs)
    except Exception as error:  # noqa: BLE001 - onnxruntime's errors have no common class
        raise ConfigError(
            f"onnxruntime can't run the exported model ({short_reason(error)}); a custom block may work only for "
            "the number of time steps and rows that it was exported with"
        ) from None
    return outputs
