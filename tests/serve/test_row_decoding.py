"""Predictions, sessions and exports of models that were trained with losses over whole rows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from stretto import Run, RunConfig, TrainedModel, load_model
from stretto.base.state import State
from stretto.cli.main import main
from stretto.data import SequenceOptions, Sequences, prepare_sequences
from stretto.errors import ConfigError
from stretto.nn import CRF, LSTM, Block, Linear, Stack, StackFrames, initialize, viterbi
from stretto.serve import CtcSessions, predict, predict_arrays
from stretto.serve.row_decoder import RowDecoder
from stretto.serve.sessions import Sessions


def train(folder: Path, loss: str) -> TrainedModel:
    """Train on rows whose symbols are their largest channel; for CTC, each symbol lasts three time steps."""
    draw = np.random.default_rng(1)
    records = []
    for _ in range(60):
        symbols = draw.integers(1, 4, draw.integers(1, 5))
        tags = np.repeat(symbols, 3)
        inputs = np.eye(4)[tags] + 0.1 * draw.normal(size=(len(tags), 4))
        targets: object = "".join("-abc"[symbol] for symbol in symbols)
        if loss == "crf":
            targets = ["-abc"[tag] for tag in tags]
        records.append({"values": inputs.tolist(), "y": targets})
    (folder / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = SequenceOptions(
        targets=("y",),
        target_kind="sequence_per_row" if loss == "ctc" else "class_per_step",
        validation_fraction=0.3,
    )
    prepare_sequences(folder / "rows.jsonl", folder / "data", options)
    config = {
        "run": {"folder": folder / "run", "device": "cpu"},
        "data": {"train": str(folder / "data/train"), "valid": str(folder / "data/valid"), "budget": 200},
        "model": {"layers": 1, "hidden": 16, "loss": loss},
        "train": {"steps": 300, "lr": 0.02},
    }
    for _ in Run(RunConfig.model_validate(config)).events():
        pass
    return load_model(folder / "run")


@pytest.fixture(scope="module")
def ctc(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainedModel]:
    folder = tmp_path_factory.mktemp("ctc")
    return folder, train(folder, "ctc")


@pytest.fixture(scope="module")
def crf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainedModel]:
    folder = tmp_path_factory.mktemp("crf")
    return folder, train(folder, "crf")


def read_rows(folder: Path) -> list[Any]:
    """The validation rows as they were before scaling."""
    sequences = Sequences.open(folder / "data/valid")
    ids = [(shard, index) for shard, size in enumerate(sequences.shard_sizes) for index in range(size)]
    return [row.copy() for row in sequences.read(sequences.step_ranges(ids))]


def test_predict_decodes_ctc_greedily_or_with_a_beam(ctc: tuple[Path, TrainedModel]) -> None:
    folder, trained = ctc
    lines = list(predict(trained, folder / "data/valid"))
    right = sum(line["text"] == line["true_text"] for line in lines)
    assert right > 0.8 * len(lines)
    assert all("".join(line["symbols"]) == line["text"] for line in lines)
    beam = list(predict(trained, folder / "data/valid", beam=8))
    assert sum(line["text"] == line["true_text"] for line in beam) > 0.8 * len(beam)
    assert all(line["log_probability"] <= 0 for line in beam)


def test_arrays_are_decoded_as_a_store_is(ctc: tuple[Path, TrainedModel], crf: tuple[Path, TrainedModel]) -> None:
    for (folder, trained), key in ((ctc, "symbols"), (crf, "labels")):
        rows = read_rows(folder)
        assert predict_arrays(trained, rows) == [line[key] for line in predict(trained, folder / "data/valid")]
    outputs = cast("list[Any]", predict_arrays(ctc[1], read_rows(ctc[0]), per_step=True))
    assert outputs[0].shape == (len(read_rows(ctc[0])[0]), 4)


def test_predict_gives_the_viterbi_tags_of_a_crf(crf: tuple[Path, TrainedModel]) -> None:
    folder, trained = crf
    labels = [label for line in predict(trained, folder / "data/valid") for label in line["labels"]]
    true_labels = [label for line in predict(trained, folder / "data/valid") for label in line["true_labels"]]
    assert sum(map(str.__eq__, labels, true_labels)) > 0.8 * len(labels)


def test_a_crf_is_decoded_with_its_transitions_not_step_by_step(crf: tuple[Path, TrainedModel]) -> None:
    loss: Any = crf[1].stack.loss
    names, y = tuple("abc"), torch.tensor([[1.0, 0.9, 0.0], [0.0, 1.0, 0.9]])
    weights = {name: weight.clone() for name, weight in loss.state_dict().items()}
    with torch.no_grad():
        for weight in loss.parameters():
            weight.zero_()
        loss.transitions[0, 1] = -5.0
    decoded = RowDecoder(names, crf=loss).decode(y).names
    loss.load_state_dict(weights)
    assert decoded == ["b", "b"], "step by step, it would be a and b"


def test_the_command_writes_texts_and_prints_their_error_rates(
    ctc: tuple[Path, TrainedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["predict", str(ctc[0] / "run"), "--out", str(tmp_path / "out.jsonl"), "--beam", "4"]
    assert main(arguments) == 0
    line = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert {"text", "symbols", "true_text", "true_symbols", "log_probability"} < set(line)
    assert "word error rate" in capsys.readouterr().out


@pytest.mark.parametrize(("loss", "beam", "sentence"), [("ctc", 0, "beam=0 is less than 1"), ("crf", 4, "beam=4 is")])
def test_a_beam_that_is_not_allowed_is_refused(
    loss: str, beam: int, sentence: str, request: pytest.FixtureRequest
) -> None:
    folder, trained = request.getfixturevalue(loss)
    with pytest.raises(ConfigError, match=sentence):
        next(predict(trained, folder / "data/valid", beam=beam))


def chunks_of(rows: list[Any], size: int) -> Iterator[dict[int, torch.Tensor]]:
    for start in range(0, max(map(len, rows)), size):
        yield {
            index: torch.from_numpy(row[start : start + size]).float()
            for index, row in enumerate(rows)
            if start < len(row)
        }


@pytest.mark.parametrize("beam", [None, 4])
@pytest.mark.parametrize("size", [1, 5])
def test_sessions_emit_the_symbols_of_the_whole_rows(
    ctc: tuple[Path, TrainedModel], beam: int | None, size: int
) -> None:
    folder, trained = ctc
    rows = read_rows(folder)
    sessions = CtcSessions(trained.raw_stack, trained.data_spec.labels, beam)
    symbols: dict[int, list[str]] = {index: [] for index in range(len(rows))}
    num_early = 0
    for chunk in chunks_of(rows, size):
        for index, new in sessions.feed(chunk).items():
            symbols[index] += new
            num_early += len(new)
    assert num_early > 0.5 * sum(map(len, symbols.values())), "symbols are emitted before the end"
    for index in symbols:
        symbols[index] += sessions.close(index)
    assert len(sessions) == 0
    assert list(symbols.values()) == predict_arrays(trained, rows, beam=beam)


def test_names_of_sessions_are_those_of_all_outputs(ctc: tuple[Path, TrainedModel]) -> None:
    sentence = "names has 2 names, but the model has 4 outputs"
    with pytest.raises(ConfigError, match=sentence):
        CtcSessions(ctc[1].raw_stack, ("a", "b"))
    sessions = CtcSessions(Stack([HostRead()]), ("a", "b"))
    with pytest.raises(ConfigError, match=sentence):
        sessions.feed({"x": torch.zeros(3, 4)})
    assert len(sessions) == 0 and sessions.close("x") == []
    with pytest.raises(ConfigError, match="session 'x' does not exist"):
        sessions.state("x")


class HostRead(Block):
    """A block whose number of outputs is not known before it has run."""

    def forward(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        return x * float(x.mean()), state


@pytest.mark.parametrize("beam", [None, 3])
@pytest.mark.parametrize("cut", range(1, 12, 2))
def test_a_stream_continues_in_other_sessions(beam: int | None, cut: int) -> None:
    stack = Stack([StackFrames(2), LSTM(6, 8), Linear(8, 4)])
    initialize(stack, seed=1)
    with torch.no_grad():
        stack[2].get_submodule("module").get_parameter("weight").mul_(20)  # so that symbols change often
    names, x = ("", "a", "b", "c"), torch.randn(31, 3, generator=torch.Generator().manual_seed(3))
    whole, first, second = (CtcSessions(stack, names, beam) for _ in range(3))
    expected = whole.feed({"x": x})["x"] + whole.close("x")
    assert len(set(expected)) > 1
    symbols = first.feed({"x": x[:cut]})["x"]
    second.restore("y", first.state("x"))
    assert list(second) == ["y"]
    first.feed({"x": x[:5]})  # what the first sessions do no longer matters
    symbols += second.feed({"y": x[cut:]})["y"] + second.close("y")
    assert symbols == expected


def test_a_state_of_another_kind_of_sessions_is_refused() -> None:
    stack, names, x = Stack([LSTM(3, 4), Linear(4, 3)]), ("", "a", "b"), torch.randn(5, 3)
    greedy, beam, plain = CtcSessions(stack, names), CtcSessions(stack, names, 3), Sessions(stack)
    for sessions in (greedy, beam, plain):
        sessions.feed({"x": x})
    sentence = r"use a state of the same kind of decoder"
    for target, source in ((greedy, beam), (beam, greedy), (greedy, plain), (beam, plain)):
        with pytest.raises(ConfigError, match=sentence):
            target.restore("y", source.state("x"))
        assert "y" not in target
    with pytest.raises(ConfigError, match=r"use a state of the same kind of decoder"):
        greedy.restore("y", ())


def test_decoding_does_not_move_the_loss_of_the_model() -> None:
    crf = CRF(3)
    with pytest.raises(NotImplementedError):  # nothing can be read from the meta device
        RowDecoder(("a", "b", "c"), crf=crf).decode(torch.zeros(2, 3, device="meta"))
    assert crf.transitions.device.type == "cpu"


def test_an_exported_crf_can_be_decoded_with_its_metadata(crf: tuple[Path, TrainedModel], tmp_path: Path) -> None:
    folder, trained = crf
    path = tmp_path / "tagger.onnx"
    assert main(["export", str(folder / "run"), "--onnx", str(path)]) == 0
    metadata = {item.key: item.value for item in onnx.load(path).metadata_props}
    decoding = json.loads(metadata["stretto.decoding"])
    weights = [torch.tensor(decoding[name]) for name in ("transitions", "start", "end")]
    x = read_rows(folder)[0]
    session = onnxruntime.InferenceSession(path)
    state = {own.name: np.zeros((1, *own.shape[1:]), np.float32) for own in session.get_inputs() if own.name != "x"}
    (y,) = session.run(["y"], {"x": x[:, None].astype(np.float32), **state})
    tags, _ = viterbi(torch.from_numpy(y), *weights)
    labels = json.loads(metadata["stretto.labels"])
    assert [labels[tag] for tag in tags[:, 0].tolist()] == predict_arrays(trained, [x])[0]


def test_an_exported_ctc_model_says_what_is_left_to_its_caller(
    ctc: tuple[Path, TrainedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ears.onnx"
    assert main(["export", str(ctc[0] / "run"), "--onnx", str(path)]) == 0
    assert "y are scores; decode them yourself" in capsys.readouterr().out
    metadata = {item.key: item.value for item in onnx.load(path).metadata_props}
    assert json.loads(metadata["stretto.decoding"]) == {"kind": "ctc", "blank": 0}


def test_sessions_of_a_stack_need_no_run() -> None:
    stack = Stack([LSTM(3, 8), Linear(8, 4)])
    initialize(stack, seed=1)
    x = torch.randn(20, 3)
    names = ("", "a", "b", "c")
    expected = RowDecoder(names).decode(Sessions(stack).feed({"x": x})["x"]).names
    assert CtcSessions(stack, names).feed({"x": x})["x"] == expected


def test_a_stream_that_ends_within_a_group_is_decoded_to_its_end() -> None:
    output = Linear(2, 3)
    with torch.no_grad():
        output.module.get_parameter("weight").copy_(torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]))
        output.module.get_parameter("bias").zero_()
    sessions = CtcSessions(Stack([StackFrames(2), output]), ["", "a", "b"])
    assert sessions.feed({"x": torch.tensor([[1.0], [1.0], [-1.0]])}) == {"x": ["a"]}
    assert sessions.close("x") == ["b"] and sessions.close("x") == []
