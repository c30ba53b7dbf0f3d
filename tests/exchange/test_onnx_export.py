import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.random_stacks import causal_stacks, draw_inputs, run_stack
from stretto.base.state import State
from stretto.base.tf32 import use_tf32
from stretto.data import Task
from stretto.errors import ConfigError
from stretto.exchange import export_onnx, onnx_export
from stretto.nn import (
    GRU,
    LSTM,
    MLSTM,
    SLSTM,
    BidirectionalGRU,
    BidirectionalLSTM,
    Block,
    CausalConv,
    Dropout,
    Embedding,
    FinalStates,
    LayerNorm,
    Linear,
    LockedDropout,
    MaxPool,
    MeanPool,
    MinGRU,
    MinLSTM,
    Pointwise,
    PoolTime,
    Rows,
    Stack,
    StackFrames,
)


def stream(path: Path, chunks: list[Tensor]) -> Tensor:
    """Run a model in onnxruntime, chunk by chunk, without stretto."""
    session = onnxruntime.InferenceSession(path)
    rows = chunks[0].shape[1]
    state: dict[str, Any] = {
        own.name: torch.zeros(rows, *own.shape[1:]).numpy() for own in session.get_inputs() if own.name != "x"
    }
    names = [own.name for own in session.get_outputs()]
    outputs = []
    for chunk in chunks:
        results = dict(zip(names, session.run(None, {"x": chunk.numpy(), **state}), strict=True))
        outputs.append(torch.from_numpy(results["y"]))
        state = {name: results[f"{name}.next"] for name in state}
    return torch.cat(outputs)


@settings(max_examples=15, deadline=None)
@given(stack=causal_stacks(), lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4), rows=st.integers(1, 4))
def test_a_model_run_in_chunks_by_onnxruntime_equals_the_stack_on_the_whole_input(
    stack: Stack, lengths: list[int], rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    exported = export_onnx(stack, path)
    assert exported.max_difference is not None and exported.max_difference <= 1e-5
    x = draw_inputs(stack, sum(lengths), rows)
    assert torch.allclose(stream(path, [*torch.split(x, lengths)]), run_stack(stack, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "cell", [MinGRU(3, 4), MinGRU(3, 4, bias=False), MinLSTM(3, 4), MLSTM(3, 4, num_heads=2), SLSTM(3, 4, num_heads=2)]
)
def test_cells_that_onnx_lacks_are_scans_over_time(cell: Block, tmp_path: Path) -> None:
    for parameter in cell.parameters():
        nn.init.normal_(parameter)
    stack = Stack([cell, Linear(4, 2)])
    exported = export_onnx(stack, tmp_path / "cell.onnx")
    assert exported.max_difference is not None and exported.max_difference <= 1e-5
    x = torch.randn(90, 3, 3)
    streamed = stream(tmp_path / "cell.onnx", [*torch.split(x, [1, 70, 19])])
    torch.testing.assert_close(streamed, run_stack(stack, x), rtol=1e-4, atol=1e-4)


def test_states_are_named_by_the_absolute_index_of_their_block(tmp_path: Path) -> None:
    stack = Stack([Embedding(5, 3), Dropout(0.5), LSTM(3, 4, 2), GRU(4, 3), Linear(3, 2)])
    exported = export_onnx(stack, tmp_path / "whole.onnx")
    assert exported.inputs == ("x", "state.2.h", "state.2.c", "state.3.h")
    assert exported.outputs == ("y", "state.2.h.next", "state.2.c.next", "state.3.h.next")
    assert export_onnx(stack[3:], tmp_path / "part.onnx").inputs == ("x", "state.3.h")


def test_layers_are_operators_and_time_and_rows_have_no_fixed_size(tmp_path: Path) -> None:
    norm = Pointwise(nn.LayerNorm(4, bias=False))
    stack = Stack([LSTM(3, 4, 2), GRU(4, 4), LayerNorm(4), norm, Pointwise(nn.ReLU()), Linear(4, 2)])
    export_onnx(stack, tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    operators = [node.op_type for node in graph.node]
    assert (operators.count("LSTM"), operators.count("GRU")) == (2, 1)
    for value in (graph.input[0], graph.output[0]):
        assert [dim.dim_param for dim in value.type.tensor_type.shape.dim[:2]] == ["time", "rows"]
    assert all(value.type.tensor_type.shape.dim[0].dim_param == "rows" for value in graph.input[1:])


def test_a_stack_in_training_mode_is_exported_for_inference_and_not_changed(tmp_path: Path) -> None:
    stack = Stack([LSTM(3, 4), Dropout(0.9), Linear(4, 2)]).double().train()
    export_onnx(stack, tmp_path / "model.onnx")
    assert stack.training and stack.dtype is torch.float64
    x = torch.randn(5, 2, 3)
    assert torch.allclose(stream(tmp_path / "model.onnx", [x]).double(), run_stack(stack, x.double()), atol=1e-5)


def test_a_bidirectional_block_starts_at_the_last_valid_step_of_each_row(tmp_path: Path) -> None:
    stack = Stack([BidirectionalLSTM(3, 4, 2), Linear(8, 2)])
    assert export_onnx(stack, tmp_path / "model.onnx").inputs == ("x", "state.0.lengths")
    x, lengths = torch.randn(9, 3, 3), torch.tensor([9, 4, 1])
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    y = torch.from_numpy(session.run(["y"], {"x": x.numpy(), "state.0.lengths": lengths.numpy()})[0])
    assert torch.allclose(y, run_stack(stack, x, (lengths,)), atol=1e-6)
    assert not torch.allclose(y, run_stack(stack, x), atol=1e-3)
    assert metadata(tmp_path / "model.onnx")["stretto.causal"] == "false"


@pytest.mark.parametrize("pooling", [MeanPool, MaxPool, FinalStates])
@pytest.mark.parametrize("cell", [BidirectionalLSTM, BidirectionalGRU])
def test_the_summary_of_a_row_of_any_length_is_exported(
    pooling: type[MeanPool | MaxPool | FinalStates], cell: type[BidirectionalLSTM | BidirectionalGRU], tmp_path: Path
) -> None:
    stack = Stack([cell(3, 4), pooling(8), Linear(8, 2)])
    export_onnx(stack, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    x, lengths = torch.randn(9, 3, 3), torch.tensor([9, 4, 1])
    _, first, second = (value.name for value in session.get_inputs()[1:])
    state = stack.initial_state(replace(Rows.of(3), lengths=lengths))  # all zeros, but for the lengths
    assert not any(bool(tensor.any()) for tensor in state[1:])
    inputs = {"x": x, "state.0.lengths": lengths, first: state[1], second: state[2]}
    (y,) = session.run(["y"], {name: tensor.numpy() for name, tensor in inputs.items()})
    assert torch.allclose(torch.from_numpy(y), run_stack(stack, x, state), atol=1e-6)


def metadata(path: Path) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


class RunningSum(Block):
    """A custom block with a state."""

    def initial_state(self, rows: Rows) -> State:
        return (rows.zeros(4),)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        sums = torch.cumsum(x, 0) + state[0]
        return sums, (sums[-1],)


class Undecided(Block):
    """Has control flow that depends on values, which can't be exported."""

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return (x if float(x.sum()) > 0 else -x), state


@pytest.mark.long
@pytest.mark.short
def test_a_custom_block_is_exported_through_torch_with_an_example_input(tmp_path: Path) -> None:
    stack = Stack([RunningSum(), Pointwise(nn.GELU()), LSTM(4, 4), Linear(4, 2)])
    with pytest.raises(ConfigError, match=r"inputs of block 0 \(RunningSum\) are not known; pass example="):
        export_onnx(stack, tmp_path / "model.onnx")
    with use_tf32(False):  # as in a process that has measured a profile
        exported = export_onnx(stack, tmp_path / "model.onnx", example=torch.zeros(2, 2, 4))
    assert exported.inputs == ("x", "state.0.0", "state.2.h", "state.2.c")
    x = torch.randn(11, 6, 4)
    assert torch.allclose(stream(tmp_path / "model.onnx", [*torch.split(x, [1, 7, 3])]), run_stack(stack, x), atol=1e-5)


class Doubled(Stack):
    """Overrides forward, so its blocks are not exported one by one."""

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, after = super().forward(x, state)
        return 2 * y, after


def test_the_states_of_a_stack_with_its_own_forward_are_numbered(tmp_path: Path) -> None:
    stack = Stack([Linear(3, 4), Doubled([LockedDropout(0.5), RunningSum()])])
    exported = export_onnx(stack, tmp_path / "model.onnx")
    assert exported.inputs == ("x", "state.1.0", "state.1.1")
    assert exported.max_difference is not None and exported.max_difference <= 1e-5


def test_a_block_that_can_not_be_exported_is_refused_by_index_and_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"block 1 \(Undecided\) can't be exported to ONNX"):
        export_onnx(Stack([Linear(3, 3), Undecided()]), tmp_path / "model.onnx")


def test_a_model_that_differs_from_its_stack_is_not_written(tmp_path: Path) -> None:
    linear = Linear(3, 3)
    linear.module.register_forward_hook(lambda module, ins, y: 2 * y)
    with pytest.raises(ConfigError, match=r"results differ from torch's by .* was not written"):
        export_onnx(Stack([linear]), tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_that_outputs_nan_is_not_written(value: float, tmp_path: Path) -> None:
    linear = Linear(3, 3)
    nn.init.constant_(linear.module.get_parameter("bias"), value)
    with pytest.raises(ConfigError, match=r"results differ from torch's by nan"):
        export_onnx(Stack([linear]), tmp_path / "model.onnx")


@pytest.mark.parametrize("is_large", [False, True])
def test_a_failed_export_leaves_the_old_file(is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, breaking = Linear(3, 300), Embedding(9, 300)
    wrong.module.register_forward_hook(lambda module, ins, y: 2 * y)
    # A table with too few rows; the hook hides that from torch, but not from onnxruntime.
    breaking.module.register_parameter("weight", nn.Parameter(torch.zeros(2, 300)))
    breaking.module.register_forward_pre_hook(lambda module, ins: (ins[0] % 2,))
    monkeypatch.setattr(onnx_export, "MAX_INLINE_BYTES", 0)
    export_onnx(Stack([Linear(3, 300)]), tmp_path / "model.onnx")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert sorted(before) == ["model.onnx", "model.onnx.data"]
    monkeypatch.setattr(onnx_export, "MAX_INLINE_BYTES", 0 if is_large else 1 << 30)
    for stack, sentence in ((Stack([wrong]), "differ from torch"), (Stack([breaking]), "onnxruntime can't run")):
        with pytest.raises(ConfigError, match=sentence):
            export_onnx(stack, tmp_path / "model.onnx")
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    export_onnx(Stack([Linear(3, 301)]), tmp_path / "model.onnx")
    assert len([*tmp_path.iterdir()]) == 1 + is_large


def test_a_missing_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack([LSTM(3, 4)])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", None)
        assert export_onnx(stack, tmp_path / "model.onnx").max_difference is None
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnx", None)
        with pytest.raises(ConfigError, match=r"needs onnx; pip install 'stretto\[onnx\]'"):
            export_onnx(stack, tmp_path / "model.onnx")


def test_large_weights_go_into_a_second_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_export, "MAX_INLINE_BYTES", 1000)
    stack = Stack([LSTM(3, 40), Linear(40, 2)])
    for _ in range(2):
        assert export_onnx(stack, tmp_path / "model.onnx").max_difference is not None
        assert (tmp_path / "model.onnx.data").stat().st_size < 40_000, "not appended to the one before"
    assert (tmp_path / "model.onnx").stat().st_size < 20_000


class FakeTrainedModel:
    """A stack with a task and metadata, like a trained model."""

    def __init__(self, stack: Stack, task: Task) -> None:
        self.stack = self.raw_stack = stack
        self.data_spec = self
        self.task = task

    def metadata(self) -> dict[str, str]:
        return {"labels": json.dumps(["no", "yes"])}


def test_the_metadata_is_written_into_the_model(tmp_path: Path) -> None:
    described = FakeTrainedModel(Stack([LSTM(4, 3), Linear(3, 2)]), Task("channels", 4, "class_per_row", 2))
    export_onnx(described, tmp_path / "model.onnx")
    found = metadata(tmp_path / "model.onnx")
    assert json.loads(found["stretto.labels"]) == ["no", "yes"]
    assert found["stretto.causal"] == "true" and found["stretto.version"]


def test_a_path_that_can_not_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"can't be written .*; choose a different file"):
        export_onnx(Stack([LSTM(3, 4)]), tmp_path / "file" / "model.onnx")


@pytest.mark.parametrize(
    "blocks",
    [
        [StackFrames(3), LSTM(6, 4), PoolTime(2)],
        [Linear(2, 2), PoolTime(3, "max"), CausalConv(2, 3, 5, 2)],
        [CausalConv(2, 3, 2, 2, bias=False), GRU(3, 2), CausalConv(2, 2, 3)],
    ],
)
def test_strided_blocks_equal_onnxruntime_also_where_rows_end(blocks: list[Block], tmp_path: Path) -> None:
    stack = Stack(blocks).eval()
    exported = export_onnx(stack, tmp_path / "model.onnx", example=torch.randn(5, 3, 2))
    assert exported.max_difference is not None and exported.max_difference < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    x, rows = torch.randn(13, 2, 2), replace(Rows.of(2), lengths=torch.tensor([13, 4]))
    x[4:, 1] = torch.nan
    names = [name for name in exported.inputs if name != "x"]
    state = stack.begin(rows)
    y, _ = stack(x, state)
    (actual, *_) = session.run(None, {"x": x.numpy()} | {n: t.numpy() for n, t in zip(names, state, strict=True)})
    length = -(-4 // stack.stride)
    torch.testing.assert_close(torch.tensor(actual)[:, 0], y[:, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(actual)[:length, 1], y[:length, 1], rtol=1e-5, atol=1e-6)
