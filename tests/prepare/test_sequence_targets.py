"""A target sequence per row in files: JSONL, CSV, Parquet and arrays, texts and lists."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.data import Batches, LabeledItems, Position, SequenceOptions, Sequences, prepare_sequences
from stretto.errors import DataError

NONE = -100
INPUTS = [[[0.5, 1.0]] * length for length in (5, 3, 4, 2)]


def jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prepare(path: Path, out: Path, **options: object) -> Sequences:
    (store,) = prepare_sequences(path, out, SequenceOptions(**options))  # type: ignore[arg-type]
    return store


def targets_of(store: Sequences) -> list[list[int]]:
    items = LabeledItems(store)
    return [row.tolist() for row in items.read_targets([(0, index) for index in range(store.num_sequences)])]


@pytest.mark.parametrize(
    ("targets", "kind"),
    [
        (["abc", "b", None, "ca"], "sequence_per_row"),
        ([["a", "b", "c"], ["b"], [], ["c", "a", "b"]], "sequence_per_row"),
        ([["a", "b", "c"], ["b"], [], ["c"]], None),
        ([[1, 2, 7], [2], [], [1, 2, 7]], None),
    ],
    ids=["text", "lists", "inferred from text", "inferred from integers"],
)
def test_targets_have_a_length_of_their_own(targets: list[Any], kind: str | None, tmp_path: Path) -> None:
    records = [{"values": inputs, "y": target} for inputs, target in zip(INPUTS, targets, strict=True)]
    store = prepare(jsonl(tmp_path / "a.jsonl", records), tmp_path / "out", targets="y", target_kind=kind)
    stored = store.fields.targets
    assert stored is not None and stored.kind == "sequence_per_row" and stored.names[0] == ""
    names = [[stored.names[symbol] for symbol in row] for row in targets_of(store)]
    assert names == [[str(symbol) for symbol in target or []] for target in targets]


def test_a_list_in_a_csv_cell_and_padded_arrays_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('x,y\n"[1.5, 2, 3]",ab\n"[4.5, 5]","[""b""]"\n')
    store = prepare(tmp_path / "a.csv", tmp_path / "csv", sequence="x", targets="y", target_kind="sequence_per_row")
    assert targets_of(store) == [[1, 2], [2]]
    symbols = np.array([[3, 1, NONE], [2, NONE, NONE]])
    np.savez(tmp_path / "a.npz", inputs=np.zeros((2, 3, 2), np.float32), lengths=np.array([2, 3]), targets=symbols)
    options = {"sequence": "inputs", "targets": "targets", "target_kind": "sequence_per_row"}
    store = prepare(tmp_path / "a.npz", tmp_path / "npz", **options)
    assert targets_of(store) == [[3, 1], [2]]


def test_validation_data_has_the_symbols_of_the_training_data(tmp_path: Path) -> None:
    train = [{"values": inputs, "y": "abcd"} for inputs in INPUTS]
    store = prepare(jsonl(tmp_path / "a.jsonl", train), tmp_path / "a", targets="y", target_kind="sequence_per_row")
    valid = jsonl(tmp_path / "b.jsonl", [{"values": INPUTS[0], "y": "db"}])
    options = {"targets": "y", "target_kind": "sequence_per_row", "like": store.location}
    assert targets_of(prepare(valid, tmp_path / "b", **options)) == [[4, 2]]
    unknown = jsonl(tmp_path / "c.jsonl", [{"values": INPUTS[0], "y": "dx"}])
    with pytest.raises(DataError, match="'y' is \"x\", which is not among the classes of like=FOLDER"):
        prepare(unknown, tmp_path / "c", **options)


def test_batches_of_a_store_hold_targets_of_their_own_length(tmp_path: Path) -> None:
    records = [{"values": inputs, "y": y} for inputs, y in zip(INPUTS, ["abcdefg", "b", None, "ca"], strict=True)]
    store = prepare(jsonl(tmp_path / "a.jsonl", records), tmp_path / "out", targets="y", target_kind="sequence_per_row")
    window = Batches(LabeledItems(store), budget=100).read(Position())
    assert window.targets is not None and window.targets.shape == (7, 4) and window.num_steps == 5


def test_a_damaged_end_of_targets_is_found(tmp_path: Path) -> None:
    records = [{"values": inputs, "y": "ab"} for inputs in INPUTS]
    store = prepare(jsonl(tmp_path / "a.jsonl", records), tmp_path / "out", targets="y", target_kind="sequence_per_row")
    path = Path(store.location) / "target_ends-00000.bin"
    content = np.fromfile(path, "<u8")
    content[1] = 99
    content.tofile(path)
    with pytest.raises(DataError, match="checksum mismatch"):
        targets_of(Sequences.open(store.location))


@pytest.mark.parametrize(
    ("target", "message"),
    [(1.5, "'y' is 1.5, but a sequence must be a list or a text"), ([1.5], "a label must be text, an integer or")],
)
def test_other_values_are_bad_rows(target: object, message: str, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"values": INPUTS[0], "y": "ab"}, {"values": INPUTS[0], "y": target}])
    with pytest.raises(DataError, match=message):
        prepare(path, tmp_path / "out", targets="y", target_kind="sequence_per_row")


def test_labels_of_words_are_not_taken_for_sequences_of_a_text_of_bytes(tmp_path: Path) -> None:
    records = [{"text": text, "y": ["N", "V", "N"][: text.count(" ") + 1]} for text in ("dogs eat fish", "cats run")]
    path = jsonl(tmp_path / "a.jsonl", records)
    message = "set target_kind to class_per_step or sequence_per_row, or, if each word has one, level=word"
    with pytest.raises(DataError, match=message):
        prepare(path, tmp_path / "out", targets="y")
    store = prepare(path, tmp_path / "out", targets="y", level="word")
    assert store.fields.targets is not None and store.fields.targets.kind == "class_per_step"
