import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data import Corpus, Lanes, Position, TextOptions, prepare_text
from stretto.errors import DataError

EXAMPLES = settings(max_examples=60, deadline=None)


@pytest.mark.long
@pytest.mark.short
@given(lanes=st.integers(1, 40), window=st.integers(1, 60), shares=st.integers(1, 5))
@EXAMPLES
def test_each_token_is_predicted_once_per_epoch_for_any_number_of_shares(
    lanes: int, window: int, shares: int, word_corpus: Corpus
) -> None:
    data = Lanes(word_corpus, lanes, window)
    tokens = word_corpus.read(0, word_corpus.num_tokens)
    streams: dict[int, list[int]] = {}
    for index in range(min(shares, lanes)):
        part = data.share(index, min(shares, lanes))
        for position in range(part.num_windows):
            read, whole = part.read(data.position(position)), data.read(data.position(position))
            assert read.inputs is not None and read.targets is not None and whole.inputs is not None
            assert read.num_steps == whole.num_steps, "every share sees windows of one shape"
            first = int(read.lanes[0])
            assert torch.equal(read.inputs, whole.inputs[:, first : first + read.num_rows])
            for row, (lane, length) in enumerate(zip(read.lanes.tolist(), read.lengths.tolist(), strict=True)):
                targets = read.targets[:, row]
                assert (targets[:length] >= 0).all() and (targets[length:] == -100).all()
                stream = streams.setdefault(lane, [])
                stream += targets[:length].tolist()
    assert [token for lane in sorted(streams) for token in streams[lane]] == tokens[1:].tolist()


@given(lanes=st.integers(1, 20), window=st.integers(1, 40))
@EXAMPLES
def test_a_window_continues_where_the_previous_one_ended(lanes: int, window: int, byte_corpus: Corpus) -> None:
    data = Lanes(byte_corpus, lanes, window)
    before, after = data.read(data.position(0)), data.read(data.position(1))
    assert before.targets is not None and after.inputs is not None
    assert torch.equal(after.inputs[0], before.targets[-1])
    assert before.fresh.all() and not after.fresh.any()


def test_every_epoch_starts_fresh_and_reads_the_same(byte_corpus: Corpus) -> None:
    data = Lanes(byte_corpus, 7, 50)
    again, first = data.read(data.position(data.num_windows + 1)), data.read(data.position(1))
    assert again.inputs is not None and first.inputs is not None
    assert torch.equal(again.inputs, first.inputs)
    assert data.read(data.position(data.num_windows)).fresh.all()
    assert not again.fresh.any()


def test_lengths_and_lanes_are_known_without_inputs_and_targets(byte_corpus: Corpus) -> None:
    data = Lanes(byte_corpus, 7, 50)
    for position in (0, 3, data.num_windows - 1):
        whole, bare = (
            data.read(data.position(position)),
            data.read(data.position(position), inputs=False, targets=False),
        )
        assert bare.inputs is None and bare.targets is None
        assert bare.num_steps == whole.num_steps and torch.equal(bare.lengths, whole.lengths)
        assert torch.equal(bare.lanes, whole.lanes) and torch.equal(bare.fresh, whole.fresh)


@pytest.mark.long
@pytest.mark.short
@given(
    shard=st.integers(700, 7000), lanes=st.integers(1, 30), window=st.integers(1, 40), position=st.integers(0, 10**6)
)
@EXAMPLES
def test_the_number_of_shards_changes_no_window(
    shard: int, lanes: int, window: int, position: int, text_file: Path, word_corpus: Corpus
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (sharded,) = prepare_text(
            text_file, Path(folder) / "out", TextOptions(level="word", shard_bytes=shard), workers=1
        )
        cut = [Lanes(corpus, lanes, window) for corpus in (word_corpus, sharded)]
        one, many = (data.read(data.position(position)) for data in cut)
    assert one.inputs is not None and one.targets is not None and many.inputs is not None and many.targets is not None
    assert torch.equal(one.inputs, many.inputs) and torch.equal(one.targets, many.targets)


def test_a_corpus_that_was_read_is_pickled_as_small_as_a_new_one(byte_corpus: Corpus) -> None:
    fresh = pickle.dumps(Corpus.open(byte_corpus.location))
    byte_corpus.read(0, byte_corpus.num_tokens)
    assert len(pickle.dumps(byte_corpus)) <= len(fresh) < 2000
    again = pickle.loads(pickle.dumps(byte_corpus))  # noqa: S301 - our own
    assert (again.read(0, 50) == byte_corpus.read(0, 50)).all()


def test_more_lanes_than_the_text_can_fill_are_refused(byte_corpus: Corpus) -> None:
    num_targets = byte_corpus.num_tokens - 1
    Lanes(byte_corpus, num_targets, 1)
    for lanes, window in ((num_targets + 1, 1), (100, num_targets // 100 + 1), (10**9, 10**9)):
        with pytest.raises(DataError, match=r"tokens per step, but .* to predict; use fewer lanes"):
            Lanes(byte_corpus, lanes, window)
    fitting = Lanes.fitting(byte_corpus, 10**9, 100)
    assert fitting.lanes == num_targets // 100


def test_impossible_cuts_are_refused(byte_corpus: Corpus) -> None:
    with pytest.raises(DataError, match="lanes=0"):
        Lanes(byte_corpus, 0, 5)
    lanes = Lanes(byte_corpus, 4, 5)
    for position in (Position(0, 0, -1), Position(0, 0, lanes.num_windows), Position(0, 1, 0)):
        with pytest.raises(DataError, match="does not exist: an epoch has one pool"):
            lanes.read(position)
    with pytest.raises(DataError, match="share index=3 of count=3 does not exist; use 0 <= index < count"):
        Lanes(byte_corpus, 4, 5).share(3, 3)
    with pytest.raises(DataError, match=r"layout.replicas=5 x layout.micro_batches=1 exceeds data.lanes=4"):
        Lanes(byte_corpus, 4, 5).share(0, 5)
