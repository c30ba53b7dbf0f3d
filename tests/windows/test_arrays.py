"""from_arrays: which kind of targets arrays have, and what a batch of them contains."""

import pickle
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from stretto.data import Batches, Items, Position, TargetKind, Task, from_arrays
from stretto.errors import DataError, StrettoError
from stretto.windows.items import Payload

RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(7, 4, 3))
TOKENS = RANDOM.integers(9, size=(7, 4))


@pytest.mark.parametrize(
    ("inputs", "targets", "task"),
    [
        (X, np.arange(7) % 3, Task("channels", 3, "class_per_row", 3)),
        (X, ["a", "b", "a", "c", "a", "a", "b"], Task("channels", 3, "class_per_row", 3)),
        (X, np.arange(7) % 2 == 0, Task("channels", 3, "class_per_row", 2)),
        (X, np.arange(7.0), Task("channels", 3, "values_per_row", 1)),
        (X, np.zeros((7, 5)), Task("channels", 3, "values_per_row", 5)),
        (X, np.zeros((7, 4), int), Task("channels", 3, "class_per_step", 1)),
        (X, np.zeros((7, 4, 2)), Task("channels", 3, "values_per_step", 2)),
        (X[..., 0], np.zeros((7, 2)), Task("channels", 1, "values_per_row", 2)),
        (TOKENS, None, Task("tokens", TOKENS.max() + 1, "next_token", TOKENS.max() + 1)),
        (TOKENS, np.zeros(7), Task("tokens", TOKENS.max() + 1, "values_per_row", 1)),
        (torch.zeros(2, 3, 5, dtype=torch.bfloat16), torch.tensor([1, 0]), Task("channels", 5, "class_per_row", 2)),
        ([[1, 2], [3, 4, 5]], [[0, 1], [1, 1, 0]], Task("tokens", 6, "class_per_step", 2)),
        ([np.zeros((2, 3)), np.zeros((5, 3))], [[0.5, 1], [2, 3]], Task("channels", 3, "values_per_row", 2)),
    ],
)
def test_the_kind_of_targets_follows_from_their_shape_and_dtype(inputs: object, targets: object, task: Task) -> None:
    assert from_arrays(inputs, targets).task == task  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "targets", "num_outputs"),
    [
        ("values_per_step", np.zeros((7, 4)), 1),
        ("values_per_row", np.zeros((7, 4)), 4),
        ("values_per_row", np.zeros((7, 4), int), 4),
        ("class_per_row", np.array([0.0, 1, np.nan, 4, 0, 0, 0]), 5),
    ],
)
def test_an_ambiguous_kind_is_named(kind: TargetKind, targets: NDArray[np.generic], num_outputs: int) -> None:
    task = from_arrays(X, targets, target_kind=kind).task
    assert (task.targets, task.num_outputs) == (kind, num_outputs)


def test_a_batch_has_padded_inputs_and_targets_where_they_belong() -> None:
    lengths = [4, 2, 3, 4, 1, 4, 4]
    padded = X.copy()
    padded[1, 2:] = np.nan  # padding may be anything
    per_step = RANDOM.normal(size=(7, 4, 2))
    per_step[0, 1, 0] = np.nan
    for targets, kind in ((np.arange(7) % 3, "class"), (RANDOM.normal(size=(7, 5)), "values"), (per_step, "step")):
        window = Batches(from_arrays(padded, targets, lengths=lengths), max_rows=7).read(Position())
        assert window.inputs is not None and window.targets is not None
        assert window.inputs.shape == (4, 7, 3) and window.inputs.dtype == torch.float64
        assert window.inputs.isfinite().all() and window.lengths.tolist() == sorted(lengths, reverse=True)
        for row in range(7):
            length = int(window.lengths[row])
            index = next(index for index in range(7) if np.array_equal(X[index, :1], window.inputs[:1, row].numpy()))
            assert lengths[index] == length
            assert np.array_equal(window.inputs[:length, row].numpy(), X[index, :length])
            actual = window.targets[:, row]
            if kind == "step":
                assert np.array_equal(actual[:length].numpy(), targets[index, :length], equal_nan=True)
                assert actual[length:].isnan().all()
            else:
                assert np.array_equal(actual[length - 1].numpy(), targets[index])
                others = torch.cat([actual[: length - 1], actual[length:]])
                assert (others.isnan() if kind == "values" else others == -100).all()


def test_max_rows_is_the_batch_size_and_each_row_comes_once_per_epoch() -> None:
    data = Batches(from_arrays(np.arange(100.0).reshape(100, 1), np.zeros((100, 3))), max_rows=10)
    position, seen = Position(), []
    while position.epoch == 0:
        window = data.read(position)
        assert window.inputs is not None and window.num_rows == 10
        seen += window.inputs.flatten().tolist()
        position = data.next_position(position)
    assert sorted(seen) == list(range(100)) and seen != sorted(seen)
    assert str(data) == "100 rows in batches of at most 10 rows"


def test_rows_are_cut_into_shorter_ones() -> None:
    ragged, tags = [X[0], X[1, :1], X[2, :3]], [[0, 1, 2, 0], [1], [2, 2, 1]]
    items = from_arrays(ragged, tags)
    parts = items.cut(2)
    assert parts.task == items.task and parts.inputs.lengths.tolist() == [2, 2, 1, 2, 1]
    expected = from_arrays([X[0, :2], X[0, 2:], X[1, :1], X[2, :2], X[2, 2:3]], [[0, 1], [2, 0], [1], [2, 2], [1]])
    assert parts.digest == expected.digest
    with pytest.raises(DataError, match="targets of kind values_per_row can't be cut; use targets per time step"):
        from_arrays(X, np.zeros(7)).cut(2)


def test_items_can_be_pickled_and_their_digest_tells_data_apart() -> None:
    items = from_arrays(X, np.arange(7.0))
    again = pickle.loads(pickle.dumps(items))  # noqa: S301 - our own bytes
    assert again.digest == items.digest
    others = [from_arrays(X, np.arange(7.0) + 1), from_arrays(X + 1, np.arange(7.0)), from_arrays(X, np.arange(7))]
    assert len({items.digest, *(other.digest for other in others)}) == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_arrays(X), "targets are missing, and inputs are floats, not tokens; give targets"),
        (lambda: from_arrays(X, np.zeros((7, 4))), "could mean values_per_row or values_per_step; set target_kind"),
        (
            lambda: from_arrays(X, np.zeros((7, 5), int)),
            "values_per_row or sequence_per_row; set target_kind",
        ),
        (
            lambda: from_arrays(X, [["a", "b"]] * 7),
            "targets are lists of texts, 2 in row 0, whose inputs have 4 time steps; set target_kind='sequence_per_row",
        ),
        (
            lambda: from_arrays([["in", "Rome"], ["Anna"]], [["O", "B-LOC"], ["B-PER"]]),
            r'inputs are texts; use integers for tokens, .* prepare_sequences\(\[\{"tokens": words, "tags": tags\}',
        ),
        (lambda: from_arrays(["a text", "b"], [0, 1]), "inputs are texts; use integers for tokens"),
        (lambda: from_arrays(X, np.zeros(6)), "targets have 6 rows, but inputs have 7; make them equal"),
        (lambda: from_arrays(X, -np.ones(7, int)), "targets has -1 .* count classes from 0, and use -100"),
        (lambda: from_arrays(X, np.arange(7), classes=6), "targets has 6 in row 6, but .* only 6 classes"),
        (lambda: from_arrays(TOKENS - 1, np.zeros(7)), "inputs has -1 .* count tokens from 0, and pass lengths"),
        (lambda: from_arrays(TOKENS * 0 - 100, np.zeros(7)), "inputs has -100 .* pass lengths if rows are padded"),
        (lambda: from_arrays(X, list("aabaaba"), classes=["a"]), "targets have the class 'b' in row 2, which"),
        (lambda: from_arrays(X, np.full(7, 0.5), target_kind="class_per_row"), "has 0.5, which is not a class"),
        (lambda: from_arrays(X, np.zeros(7), target_kind="horizon"), "target_kind='horizon' is not possible"),
        (
            lambda: from_arrays(X, np.zeros(7), target_kind="class_per_step"),
            "has 1 time steps, but inputs",
        ),
        (lambda: from_arrays(X * np.inf, np.zeros(7)), r"inputs\[0\] has a value that is NaN or infinite"),
        (lambda: from_arrays(X, np.full(7, np.inf)), "targets are infinite"),
        (lambda: from_arrays(X[:, :, None], np.zeros(7)), r"inputs have shape \[rows, 4, 1, 3\]; use \[rows, time, ch"),
        (lambda: from_arrays(X, np.zeros(7), lengths=[1]), "give one integer per row, 7 in all"),
        (lambda: from_arrays(X, np.zeros(7), lengths=[0] * 7), "row 0 has length 0, but must have 1 to 4 time steps"),
        (
            lambda: from_arrays([X[0], X[1, :, :2]], [1, 2]),
            r"inputs\[1\] has shape \[4, 2\], but inputs\[0\] has",
        ),
        (lambda: from_arrays("abc", [1]), "inputs is an object of type str; use a numpy array"),
        (lambda: from_arrays([], []), "inputs has no rows"),
        (lambda: Batches(from_arrays(X, np.zeros(7))), "Batches have no size; set budget .* or max_rows"),
        (
            lambda: Batches(from_arrays(X, np.zeros(7)), budget=3),
            "inputs: sequence 0 of shard 0 has 4 time steps",
        ),
        (
            lambda: Batches(cast(Any, X), max_rows=2),
            "items is an object of type ndarray; make them with stretto.data.from_arrays",
        ),
    ],
)
def test_a_mistake_is_one_sentence(make: Callable[[], object], message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        make()


class _Wrong(Items):
    """Returns rows first, as a DataLoader would."""

    task = Task("channels", 2, "values_per_row", 1)
    shard_sizes = (4,)
    longest = 3
    mean_length = 3.0

    def lengths(self, shard: int, start: int, stop: int) -> NDArray[np.int64]:
        return np.full(stop - start, 3)

    def read(self, rows: object, num_steps: int, *, inputs: bool, targets: bool) -> Payload:
        return torch.zeros(4, num_steps, 2), torch.zeros(4, num_steps, 1)


def test_items_of_a_user_are_checked() -> None:
    with pytest.raises(DataError, match=r"_Wrong.read returned inputs of shape \[4, 3, 2\]; return \[3, 4, ...\]"):
        Batches(_Wrong(), max_rows=4).read(Position())


def test_classes_given_as_text_are_encoded_once() -> None:
    items = from_arrays(np.zeros((3, 2, 1), np.float32), np.array(["wet", None, "dry"], object))
    assert items.targets is not None and items.targets.rows.rows.tolist() == [1, -100, 0]  # type: ignore[union-attr]
    _, targets = items.read([(0, 0), (0, 1), (0, 2)], 2, inputs=False, targets=True)
    assert targets is not None and targets.tolist() == [[-100, -100, -100], [1, -100, 0]]


@pytest.mark.parametrize("is_dense", [True, False], ids=["dense", "list"])
def test_the_row_of_a_wrong_class_is_named(is_dense: bool) -> None:
    classes = np.zeros((5, 4), np.int64)
    classes[3, 1] = 7
    targets = classes if is_dense else list(classes)
    with pytest.raises(DataError, match="targets has 7 in row 3, but there are only 2 classes"):
        from_arrays(np.zeros((5, 4, 1)), targets, classes=2)
    names = np.where(classes == 7, "b", "a")
    with pytest.raises(DataError, match="the class 'b' in row 3, which is not one of"):
        from_arrays(np.zeros((5, 4, 1)), names if is_dense else list(names), classes=["a"])
