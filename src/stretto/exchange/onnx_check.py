"""Is an exported model what it was made from? Both run on the same numbers, chunk by chunk, and are compared."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.extras import import_optional_dependency
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.stack import Stack
from stretto.exchange.input_spec import InputSpec
from stretto.exchange.onnx_blocks import state_names

# Lengths of chunks, for several numbers of rows; none is what the model was exported with.
_TEST_SHAPES = ((1, (1, 7)), (2, (13, 1, 4)), (7, (3, 29)))


def compare_with_onnxruntime(stack: Stack, path: Path, input_spec: InputSpec) -> float | None:
    """Return the greatest difference between torch's results and onnxruntime's, relative where they are large.

    State is fed back from chunk to chunk, each side its own. None if onnxruntime isn't installed.
    """
    if find_spec("onnxruntime") is None:
        return None
    session = _open_session(path)
    generator = torch.Generator().manual_seed(1)
    found = [0.0]
    for num_rows, chunks in _TEST_SHAPES:
        # A block that looks ahead has no state to go on with: its rows end in the one chunk there is.
        lengths = torch.randint(1, sum(chunks) + 1, (num_rows,), generator=generator)
        found += _differences(
            stack, session, input_spec, chunks if stack.causal else (sum(chunks),), lengths, generator
        )
    # Not Python's max, which passes over what is not a number.
    return float(np.max(found))


def _differences(
    stack: Stack,
    session: Any,  # noqa: ANN401 - onnxruntime has no types
    input_spec: InputSpec,
    chunks: tuple[int, ...],
    lengths: Tensor,
    generator: torch.Generator,
) -> list[float]:
    num_rows = len(lengths)
    rows = Rows.of(num_rows, dtype=torch.float32)
    if not stack.causal:
        rows = Rows(rows.lanes, lengths, rows.fresh, rows.key, rows.device, rows.dtype)
    names = state_names(stack)
    state = stack.initial_state(rows)
    fed = {name: tensor.numpy() for name, tensor in _name_states(names, state).items()}
    outputs = [value.name for value in session.get_outputs()]
    found = []
    for num_steps in chunks:
        x = input_spec.random_input(num_steps, num_rows, generator)
        with torch.no_grad():
            y, state = stack(x, state)
        given = dict(zip(outputs, _run_session(session, {"x": x.numpy(), **fed}), strict=True))
        fed = {name: given[f"{name}.after"] for name in fed}
        found.append(_difference(y, given["y"]))
        found += [_difference(tensor, fed[name]) for name, tensor in _name_states(names, state).items()]
    return found


def _name_states(names: list[str | None], state: State) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in zip(names, state, strict=True) if name is not None}


def _difference(expected: Tensor, given: NDArray[Any]) -> float:
    ours = expected.numpy()
    if ours.shape != given.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        return float(np.abs(ours.astype(np.float64) - given).max() / max(1.0, np.abs(ours).max()))


def _open_session(path: Path) -> Any:  # noqa: ANN401 - onnxruntime has no types
    runtime = import_optional_dependency("onnxruntime", "onnx", "a check of an ONNX model")
    try:
        return runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - onnxruntime's errors have no common class
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"onnxruntime can't open {path.name} ({reason}); export it again with a newer onnxruntime"
        ) from None


def _run_session(session: Any, given: dict[str, Any]) -> list[NDArray[Any]]:  # noqa: ANN401 - onnxruntime has no types
    try:
        found: list[NDArray[Any]] = session.run(None, given)
    except Exception as error:  # noqa: BLE001 - onnxruntime's errors have no common class
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"onnxruntime can't run the exported model ({reason}); a block of your own may depend on the number of "
            "steps or rows it was shown"
        ) from None
    return found
