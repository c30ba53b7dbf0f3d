import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.stores import rows_of
from stretto.data import SequenceOptions, Sequences, TextOptions, prepare_sequences, prepare_text
from stretto.errors import DataError
from stretto.prepare.prepare_job import Progress
from stretto.prepare.row_reader import SkippedRows
from stretto.store.sequences import Channels, Tokens
from stretto.store.vocabulary import ByteVocabulary


def jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def labels_of(store: Sequences) -> list[str]:
    assert store.fields.targets is not None
    rows = [(shard, number) for shard, size in enumerate(store.shard_sizes) for number in range(size)]
    return [store.fields.targets.names[number] for number in store.read_row_targets(rows)]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Eighths, so that 32-bit floats have room for whatever spread is drawn.
NUMBERS = st.none() | st.integers(-1000, 1000).map(lambda eighths: eighths / 8)


@given(
    records=st.one_of(
        st.lists(st.lists(st.integers(0, 10**5), min_size=1, max_size=9), min_size=1, max_size=20),
        st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=5), min_size=1, max_size=9),
        st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9), min_size=1, max_size=9),
    ),
    shard_bytes=st.integers(30, 400),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_jsonl_in_is_sequences_out(records: list[Any], shard_bytes: int, data: st.DataObject) -> None:
    labels = data.draw(st.lists(st.integers(-3, 12), min_size=len(records), max_size=len(records)))
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"x": record, "y": label} for record, label in zip(records, labels, strict=True)]
        path = jsonl(Path(folder) / "a.jsonl", rows)
        (store,) = prepare_sequences(
            path, Path(folder) / "out", SequenceOptions(sequence="x", label="y", shard_bytes=shard_bytes), workers=1
        )
        found = rows_of(store)
        assert [int(name) for name in labels_of(store)] == labels
        assert store.fields.targets is not None
        assert store.fields.targets.names == tuple(map(str, sorted(set(labels))))
    if isinstance(records[0], str):
        assert [bytes(row).decode() for row in found] == records
        assert store.fields.num_bytes == store.num_steps
    elif isinstance(records[0][0], int):
        assert found == records
        assert isinstance(store.fields.values, Tokens)
        assert store.fields.values.num_tokens == 1 + max(max(record) for record in records)
    else:
        expected = [[[math.nan if x is None else x for x in step] for step in record] for record in records]
        assert all(np.array_equal(one, two, equal_nan=True) for one, two in zip(found, expected, strict=True))


@pytest.mark.long
@pytest.mark.short
@pytest.mark.parametrize("level", ["char", "word"])
def test_any_number_of_workers_writes_the_same_bytes(level: Any, tmp_path: Path) -> None:  # noqa: ANN401
    path = jsonl(tmp_path / "a.jsonl", [{"text": f"word{row % 7} is {row}", "label": row % 4} for row in range(300)])
    for workers in (1, 2):
        out = tmp_path / str(workers)
        prepare_sequences(
            path,
            out,
            SequenceOptions(label="label", level=level, validation_fraction=0.2, shard_bytes=3000),
            workers=workers,
        )
    assert content(tmp_path / "1") == content(tmp_path / "2")
    assert Sequences.open(tmp_path / "1" / "train").shard_sizes[1:]


def test_every_format_gives_the_same_store(tmp_path: Path) -> None:
    records = [
        {"values": [[0.5 * row, None if row % 3 else 1.0]] * (1 + row % 4), "y": str(row % 2)} for row in range(20)
    ]
    jsonl(tmp_path / "a.jsonl", records)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "b.parquet")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(records).save_to_disk(tmp_path / "c")
    lines = "".join(f'"{json.dumps(record["values"])}",{record["y"]}\n' for record in records)
    (tmp_path / "d.csv").write_text("values,y\n" + lines)
    stores = []
    for name in ("a.jsonl", "b.parquet", "c", "d.csv"):
        prepare_sequences(tmp_path / name, tmp_path / f"out-{name}", SequenceOptions(label="y"))
        stores.append(content(tmp_path / f"out-{name}"))
    assert stores[0] == stores[1] == stores[2] == stores[3]


def test_the_default_field_is_text_tokens_or_values(tmp_path: Path) -> None:
    for record, what in (
        ({"text": "a", "tokens": [1]}, "tokens"),
        ({"tokens": [1, 2], "values": [1]}, "tokens"),
        ({"values": [1, 2]}, "channels"),
    ):
        (store,) = prepare_sequences(jsonl(tmp_path / "a.jsonl", [record]), tmp_path / next(iter(record)))
        assert store.fields.values.type == what
        assert (store.vocabulary is not None) == ("text" in record)
    (store,) = prepare_sequences(
        tmp_path / "a.jsonl", tmp_path / "as", SequenceOptions(read_as="tokens", sequence="values")
    )
    assert store.fields.values.type == "tokens"


@pytest.mark.parametrize(("name", "what"), [("values", "channels"), ("tokens", "tokens"), ("text", "tokens")])
def test_naming_the_default_field_changes_nothing(name: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f'{name}\n"[1, 2]"\n')
    prepare_sequences(tmp_path / "a.csv", tmp_path / "default")
    (named,) = prepare_sequences(tmp_path / "a.csv", tmp_path / "named", SequenceOptions(sequence=name))
    assert content(tmp_path / "named") == content(tmp_path / "default")
    assert named.fields.values.type == what and (named.vocabulary is not None) == (name == "text")


def test_the_whole_range_of_32_bit_floats_is_kept(tmp_path: Path) -> None:
    numbers = np.array([np.finfo(np.float32).max, -1e38, 1e-45, 1e-30, 0.1, 0], np.float32).tolist()
    (store,) = prepare_sequences(jsonl(tmp_path / "a.jsonl", [{"values": numbers}]), tmp_path / "out")
    assert rows_of(store) == [[[number] for number in numbers]]


def test_a_file_given_once_instead_of_twice_makes_it_a_different_job(tmp_path: Path) -> None:
    one, two = (jsonl(tmp_path / f"{token}.jsonl", [{"tokens": [token]}]) for token in (1, 2))

    def stop(progress: Progress) -> None:
        if progress.done == 2 * one.stat().st_size:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_sequences([one, one, two], tmp_path / "out", SequenceOptions(num_tokens=3), workers=1, on_progress=stop)
    (store,) = prepare_sequences([one, two], tmp_path / "out", SequenceOptions(num_tokens=3), workers=1)
    assert rows_of(store) == [[1], [2]]


def test_validation_sequences_have_the_classes_and_statistics_of_the_training_sequences(tmp_path: Path) -> None:
    records = [{"values": [float(row), row + 0.5], "label": f"class {row % 3}"} for row in range(400)]
    train, valid = prepare_sequences(
        jsonl(tmp_path / "a.jsonl", records), tmp_path / "out", SequenceOptions(label="label", validation_fraction=0.2)
    )
    assert train.fields.values == valid.fields.values and train.fields.targets == valid.fields.targets
    rows = rows_of(train)
    assert sorted(rows + rows_of(valid)) == [[[row], [row + 0.5]] for row in range(400)]
    assert 50 < valid.num_sequences < 110
    assert isinstance(train.fields.values, Channels) and train.fields.values.names == ("values",)
    assert train.fields.values.mean[0] == pytest.approx(np.mean(rows))
    assert train.fields.values.std[0] == pytest.approx(np.std(rows))
    _, other = prepare_sequences(
        tmp_path / "a.jsonl", tmp_path / "seed", SequenceOptions(label="label", validation_fraction=0.2, seed=1)
    )
    assert rows_of(other) != rows_of(valid)


def test_the_vocabulary_is_counted_on_the_training_part(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": f"word{row}"} for row in range(50)])
    train, valid = prepare_sequences(path, tmp_path / "out", SequenceOptions(level="word", validation_fraction=0.2))
    assert train.vocabulary == valid.vocabulary and len(train.vocabulary or ()) == train.num_sequences + 1
    assert rows_of(valid) == [[0]] * valid.num_sequences


def test_statistics_ignore_missing_values_and_a_constant_channel_has_std_1(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"values": [[1, None, 0.1], [3, None, 0.1], [None, None, 0.1]]}])
    (store,) = prepare_sequences(path, tmp_path / "out")
    assert isinstance(store.fields.values, Channels)
    assert store.fields.values.names == ("values.0", "values.1", "values.2")
    assert store.fields.values.mean == pytest.approx((2, 0, 0.1)) and store.fields.values.std == (1, 1, 1)


def test_like_takes_everything_from_the_other_store(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "a b", "y": "no"}, {"text": "b", "y": "yes"}])
    (one,) = prepare_sequences(path, tmp_path / "one", SequenceOptions(level="word", label="y"))
    jsonl(tmp_path / "b.jsonl", [{"text": "c b", "y": "yes"}])
    (two,) = prepare_sequences(
        tmp_path / "b.jsonl", tmp_path / "two", SequenceOptions(like=tmp_path / "one", label="y")
    )
    assert two.vocabulary == one.vocabulary and two.fields.targets == one.fields.targets
    assert rows_of(two) == [[0, 1]] and labels_of(two) == ["yes"]
    (far,) = prepare_sequences(jsonl(tmp_path / "c.jsonl", [{"values": [9.0]}]), tmp_path / "far")
    path = jsonl(tmp_path / "d.jsonl", [{"values": [5.0, 7.0]}])
    (near,) = prepare_sequences(path, tmp_path / "near", SequenceOptions(like=tmp_path / "far"))
    assert near.fields.values == far.fields.values


def test_sequences_can_use_the_vocabulary_of_a_corpus(text_file: Path, tmp_path: Path) -> None:
    (corpus,) = prepare_text(text_file, tmp_path / "corpus", TextOptions(level="word"))
    path = jsonl(tmp_path / "a.jsonl", [{"text": "the theme nowhere"}])
    (store,) = prepare_sequences(path, tmp_path / "out", SequenceOptions(vocabulary=corpus.vocabulary))
    assert corpus.vocabulary.decode(rows_of(store)[0]) == "the theme <unk>"


def test_classes_are_sorted_as_numbers_if_all_are_numbers(tmp_path: Path) -> None:
    for labels, names in ((["10", "9", "-1"], ("-1", "9", "10")), ([10, 9, "x"], ("10", "9", "x"))):
        path = jsonl(tmp_path / "a.jsonl", [{"tokens": [1], "y": label} for label in labels])
        (store,) = prepare_sequences(path, tmp_path / str(labels[2]), SequenceOptions(label="y"))
        assert store.fields.targets is not None and store.fields.targets.names == names


GOOD: dict[str, dict[str, Any]] = {
    "text": {"text": "some words", "y": 1},
    "tokens": {"tokens": [1, 2, 3], "y": 1},
    "values": {"values": [0.5, None], "y": 1},
    "many": {"values": [[0.5, 1], [2, None]], "y": 1},
}


@pytest.mark.parametrize(
    ("kind", "bad", "problem"),
    [
        ("text", "{", "the line is not JSON"),
        ("text", "[]", "the line is not a JSON object"),
        ("text", '{"y": 1}', "it has no 'text'"),
        ("text", '{"text": null, "y": 1}', "'text' is empty"),
        ("text", '{"text": "", "y": 1}', "'text' is empty"),
        ("text", '{"text": " ", "y": 1}', "'text' has no words, only white space"),
        ("text", '{"text": 5, "y": 1}', "'text' is 5, not text"),
        ("text", '{"text": "\\ud800", "y": 1}', "'text' has half of a surrogate pair"),
        ("text", '{"text": "x"}', "it has no 'y'"),
        ("text", '{"text": "x", "y": 1.5}', "'y' is 1.5, but a label must be text, an integer or a boolean"),
        ("text", '{"text": "x", "y": ""}', "'y' is empty"),
        ("tokens", '{"tokens": [], "y": 1}', "'tokens' is an empty list"),
        ("tokens", '{"tokens": "x", "y": 1}', "'tokens' is \"x\", not a list"),
        ("tokens", '{"tokens": [1, 2.5], "y": 1}', "'tokens' has 2.5, not an integer"),
        ("tokens", '{"tokens": [1, true], "y": 1}', "'tokens' has true, not an integer"),
        ("tokens", '{"tokens": [1, -2], "y": 1}', "'tokens' has token -2, which is negative"),
        ("tokens", '{"tokens": [4294967296], "y": 1}', "'tokens' has token 4294967296, but tokens must be below"),
        ("values", '{"values": [], "y": 1}', "'values' is an empty list"),
        ("values", '{"values": [1, "x"], "y": 1}', "'values' has \"x\", not a number"),
        ("values", '{"values": [[1]], "y": 1}', "'values' has [1], not a number"),
        ("values", '{"values": [NaN], "y": 1}', "'values' has NaN, NA or an infinity"),
        ("values", '{"values": [1, -Infinity], "y": 1}', "'values' has NaN, NA or an infinity"),
        ("values", '{"values": [1e39], "y": 1}', "'values' has a number that is too large for 32-bit floats"),
        ("values", f'{{"values": [1{"0" * 400}], "y": 1}}', "'values' has a number that is too large"),
        (
            "many",
            '{"values": [[1, 2], [1]], "y": 1}',
            "'values' has a list of length 1 at a time step, but the data's first list has length 2",
        ),
        (
            "many",
            '{"values": [[1, 2, 3]], "y": 1}',
            "'values' has a list of length 3 at a time step, but the data's first list has length 2",
        ),
        ("many", '{"values": [1, 2], "y": 1}', "'values' has 1, not a list of numbers"),
    ],
)
def test_a_bad_row_is_an_error_with_its_number_or_is_skipped(kind: str, bad: str, problem: str, tmp_path: Path) -> None:
    path, good = tmp_path / "a.jsonl", json.dumps(GOOD[kind])
    path.write_text(f"{good}\n{good}\n{bad}\n{good}\n{bad}\n")
    level: Any = "word" if kind == "text" else None
    options = SequenceOptions(label="y", level=level, shard_bytes=30)
    with pytest.raises(DataError) as refused:
        prepare_sequences(path, tmp_path / "out", options, workers=1)
    assert str(refused.value).startswith(f"{path}, row 3: {problem}")
    assert str(refused.value).endswith(", or skip such rows with bad_rows=skip")
    assert not (tmp_path / "out").exists()
    skipped: list[SkippedRows] = []
    options = replace(options, bad_rows="skip")
    (store,) = prepare_sequences(path, tmp_path / "out", options, workers=1, on_skipped=skipped.append)
    assert store.num_sequences == 3
    assert skipped[0].num_rows == 2 and skipped[0].first.startswith(f"{path}, row 3: {problem}")


def test_a_bad_first_row_is_skipped_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{\n{"y": 1}\n{"values": []}\n{"values": [[1.5, 2]]}\n')
    skipped: list[SkippedRows] = []
    (store,) = prepare_sequences(
        tmp_path / "a.jsonl", tmp_path / "out", SequenceOptions(bad_rows="skip"), on_skipped=skipped.append
    )
    assert rows_of(store) == [[[1.5, 2]]] and skipped[0].num_rows == 3


def test_skipped_rows_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_text('{"tokens": [1]}\n{\n')
    prepare_sequences(tmp_path / "a.jsonl", tmp_path / "out", SequenceOptions(bad_rows="skip"))
    assert "skipped 1 bad row, the first: " in caplog.text


def test_a_file_of_blank_lines_has_no_sequence(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="no row can be read as a sequence; use different files or options"):
        prepare_sequences(tmp_path / "a.jsonl", tmp_path / "out")


def test_nan_can_be_a_missing_value(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"values": [1, NaN, Infinity, null]}\n')
    (store,) = prepare_sequences(tmp_path / "a.jsonl", tmp_path / "out", SequenceOptions(nan="missing"))
    assert np.isnan(rows_of(store)[0]).ravel().tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("records", "options", "reason"),
    [
        (
            [{"x": 1}],
            {},
            r"row 1: it has no value in 'inputs', 'text', 'tokens' or 'values' \(its fields are \['x'\]\); name",
        ),
        ([{"x": 1}], {"sequence": "z"}, r"sequence=z is not a field of .*a\.jsonl; choose from x$"),
        ([{"x": ""}], {"sequence": "x"}, "row 1: 'x' is empty"),
        ([{"text": "a"}], {"label": "z"}, r"label=z is not a field of .*a\.jsonl; choose from text$"),
        # Other records have the field, so this is about a row.
        ([{"text": "a"}, {"text": "a", "z": 1}], {"label": "z"}, "row 1: it has no 'z'"),
        ([{"x": 1}], {"bad_rows": "skip"}, r"no row can be read as a sequence \(the first is .*, row 1: it has no"),
        (
            [{"text": "a"}, {"text": ""}],
            {"label": "y", "bad_rows": "skip"},
            "would be empty: all rows are bad \\(the first is",
        ),
        ([{"text": "a"}], {"num_tokens": 5}, "num_tokens=5 has no effect on sequences of text"),
        ([{"tokens": [1]}], {"num_tokens": 0}, "num_tokens=0 must be between 1"),
        ([{"tokens": [7]}], {"num_tokens": 7}, "row 1: 'tokens' has token 7, but tokens must be below 7"),
        ([{"tokens": [1]}], {"level": "word"}, "level=word has no effect on sequences of tokens"),
        ([{"tokens": [1]}], {"vocabulary": ByteVocabulary()}, "vocabulary=.* has no effect on sequences of tokens"),
        ([{"text": "a"}], {"max_symbols": 9}, "max_symbols=9 has no effect on bytes"),
        ([{"text": "a"}], {"validation_fraction": 1}, r"validation_fraction=1 is not in \[0, 1\)"),
        ([{"text": "a"}], {"validation_fraction": 0.5}, "validation_fraction=0.5 leaves nothing for"),
        ([{"text": "a"}], {"workers": 0}, "workers=0 must be at least 1"),
        ([{"text": "a"}], {"shard_bytes": 0}, "shard_bytes=0 must be at least 1"),
        ([{"text": "a"}], {"bad_rows": "keep"}, "bad_rows='keep' is not allowed; choose from error, skip"),
        ([{"text": "a"}], {"nan": "zero"}, "nan='zero' is not allowed; choose from error, missing"),
        ([{"text": "a"}], {"read_as": "video"}, "read_as='video' is not allowed; choose from text, tokens, channels"),
        ([{"text": "a"}], {"read_as": "tokens"}, "row 1: 'text' is \"a\", not a list"),
        ([{"text": "a"}], {"like": "tokens"}, "like=.* has tokens, but 'text' holds text"),
        ([{"tokens": [3]}], {"like": "tokens"}, "row 1: 'tokens' has token 3, but tokens must be below 3"),
        ([{"tokens": [1]}], {"like": "tokens", "num_tokens": 9}, "num_tokens=9 has no effect .* of like=.*tokens;"),
        ([{"tokens": [1], "y": "z"}], {"like": "tokens", "label": "y"}, "is not among the classes of like=FOLDER"),
        ([{"values": [[1, 2]]}], {"like": "values"}, "like=.* and 'values' differ in .* channels \\(1 and 2\\)"),
        ([{"values": [1], "y": 1}], {"like": "values", "label": "y"}, "has no labels; leave label=y out"),
    ],
)
def test_contradictory_options_are_an_error(
    records: list[Any], options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    prepare_sequences(
        jsonl(tmp_path / "b.jsonl", [{"tokens": [2], "y": "a"}]), tmp_path / "tokens", SequenceOptions(label="y")
    )
    prepare_sequences(jsonl(tmp_path / "b.jsonl", [{"values": [2.5]}]), tmp_path / "values")
    options = {**options, **({"like": tmp_path / options["like"]} if "like" in options else {})}
    workers = options.pop("workers", None)
    with pytest.raises(DataError, match=reason):
        prepare_sequences(
            jsonl(tmp_path / "a.jsonl", records), tmp_path / "out", SequenceOptions(**options), workers=workers
        )
    assert not (tmp_path / "out").exists()


def test_true_and_false_are_labels(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x", "y": true}\n{"text": "y", "y": false}\n{"text": "z", "y": true}\n')
    (store,) = prepare_sequences(tmp_path / "a.jsonl", tmp_path / "out", SequenceOptions(label="y"))
    assert store.fields.targets is not None and store.fields.targets.names == ("false", "true")
    assert list(map(int, store.read_row_targets([(0, 0), (0, 1), (0, 2)]))) == [1, 0, 1]


def test_floats_without_a_fraction_are_classes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "ab", "label": float(row % 3)}) + "\n" for row in range(9)))
    (sequences,) = prepare_sequences(path, tmp_path / "out", SequenceOptions(label="label"))
    assert sequences.fields.targets is not None and sequences.fields.targets.names == ("0", "1", "2")
    path.write_text('{"text": "ab", "label": 0.5}\n')
    with pytest.raises(DataError, match=r"'label' is 0\.5, but a label must be text, an integer or a boolean"):
        prepare_sequences(path, tmp_path / "other", SequenceOptions(label="label"))


def test_rows_that_all_are_bad_are_not_advised_to_be_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"values": [1, 2], "y": [0.2, 0.3]}\n' * 5)
    with pytest.raises(DataError, match=r"row 1: 'y' is .*; predict values with targets=y, as the rows"):
        prepare_sequences(path, tmp_path / "out", SequenceOptions(label="y"), workers=1)
