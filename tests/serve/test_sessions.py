"""A session fed chunk by chunk equals the whole stream, for any number of sessions and any lengths of chunks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.layout_cases import NUM_TOKENS, custom_block_model, lstm_model, noncausal_model
from stretto.errors import ConfigError, LawError
from stretto.nn import LSTM, Block, CausalConv, PoolTime, Rows, Stack, StackFrames, State, initialize
from stretto.serve import Sessions, predict_arrays


def stack(model: str = "lstm") -> Stack:
    blocks = {"lstm": lstm_model, "custom": custom_block_model, "noncausal": noncausal_model}[model]()
    return initialize(Stack(blocks).double(), seed=3).eval()


def whole(model: Stack, tokens: Tensor) -> Tensor:
    """The model's outputs for one row, in one call."""
    with torch.no_grad():
        y, _ = model(tokens.unsqueeze(1), model.initial_state(Rows.of(1, dtype=torch.float64)))
    return y[:, 0]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), model=st.sampled_from(["lstm", "custom"]))
def test_sessions_fed_in_chunks_of_any_length_equal_the_whole(data: st.DataObject, model: str) -> None:
    streams = {
        f"s{index}": torch.randint(NUM_TOKENS, (length,), generator=torch.Generator().manual_seed(index))
        for index, length in enumerate(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5)))
    }
    network = stack(model)
    sessions = Sessions(network)
    fed = dict.fromkeys(streams, 0)
    outputs: dict[str, list[Tensor]] = {name: [] for name in streams}
    while open_now := [name for name in streams if fed[name] < len(streams[name])]:
        chosen = data.draw(st.lists(st.sampled_from(open_now), min_size=1, unique=True))
        sizes = {name: data.draw(st.integers(1, len(streams[name]) - fed[name])) for name in chosen}
        fed_outputs = sessions.feed({name: streams[name][fed[name] : fed[name] + size] for name, size in sizes.items()})
        assert set(fed_outputs) == set(chosen)
        for name, size in sizes.items():
            outputs[name].append(fed_outputs[name])
            fed[name] += size
    for name, tokens in streams.items():
        torch.testing.assert_close(torch.cat(outputs[name]), whole(network, tokens), rtol=0, atol=1e-12)


class Lag(Block):
    """Outputs its input of two steps earlier; the state it returns are views of the state it gets."""

    def initial_state(self, rows: Rows) -> State:
        return rows.zeros(2), rows.zeros(2)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        before = torch.cat([state[1].unsqueeze(0), state[0].unsqueeze(0), x])
        return before[:-2], (before[-1], state[0] if len(x) == 1 else before[-2])


def test_a_block_may_return_views_of_its_state() -> None:
    sessions = Sessions(Stack([Lag()]))
    x = torch.arange(10.0).view(5, 2)
    outputs = torch.cat([sessions.feed({"a": x[step : step + 1], "b": x[:2]})["a"] for step in range(5)])
    torch.testing.assert_close(outputs, torch.cat([torch.zeros(2, 2), x[:3]]))


def test_a_state_needs_no_gradient_even_if_the_initial_state_is_learned() -> None:
    sessions = Sessions(stack("custom"))
    sessions.restore("a", tuple(tensor for tensor in Sessions(stack("custom"))._initial_state(1)))
    sessions.feed({"a": torch.arange(3)})
    assert not any(tensor.requires_grad for tensor in sessions.state("a"))


def test_a_closed_session_starts_again_without_its_old_state() -> None:
    network = stack()
    sessions = Sessions(network)
    tokens = torch.arange(6)
    sessions.feed({"old": torch.tensor([7, 8, 9]), "kept": tokens[:2]})
    sessions.close("old")
    assert "old" not in sessions and len(sessions) == 1
    outputs = sessions.feed({"new": tokens, "old": tokens, "kept": tokens[2:]})
    torch.testing.assert_close(outputs["new"], whole(network, tokens), rtol=0, atol=1e-12)
    torch.testing.assert_close(outputs["old"], whole(network, tokens), rtol=0, atol=1e-12)
    torch.testing.assert_close(outputs["kept"], whole(network, tokens)[2:], rtol=0, atol=1e-12)


def test_a_session_continues_elsewhere_from_its_state() -> None:
    network = stack()
    tokens = torch.arange(9)
    here, there = Sessions(network), Sessions(network)
    here.feed({1: tokens[:4]})
    there.restore("one", here.state(1))
    torch.testing.assert_close(there.feed({"one": tokens[4:]})["one"], whole(network, tokens)[4:], rtol=0, atol=1e-12)


def test_many_sessions_that_start_one_by_one_keep_their_states() -> None:
    network = stack()
    sessions = Sessions(network)
    tokens = torch.arange(5)
    for index in range(70):
        sessions.feed({index: (tokens[:3] + index) % NUM_TOKENS})
    outputs = sessions.feed({index: (tokens[3:] + index) % NUM_TOKENS for index in range(70)})
    for index in range(70):
        expected = whole(network, (tokens + index) % NUM_TOKENS)[3:]
        torch.testing.assert_close(outputs[index], expected, rtol=0, atol=1e-12)


def test_an_invalid_chunk_changes_no_session() -> None:
    network = stack()
    sessions = Sessions(network)
    tokens = torch.arange(6)
    sessions.feed({"a": tokens[:3]})
    with pytest.raises(ConfigError, match="session 'b' has no time steps"):
        sessions.feed({"a": tokens[3:], "b": tokens[:0]})
    with pytest.raises(ConfigError, match="session 'b' has time steps of"):
        sessions.feed({"a": tokens[3:], "b": tokens.double()})
    with pytest.raises(IndexError):
        sessions.feed({"a": tokens[3:], "c": torch.tensor([NUM_TOKENS])})
    assert len(sessions) == 1
    torch.testing.assert_close(sessions.feed({"a": tokens[3:]})["a"], whole(network, tokens)[3:], rtol=0, atol=1e-12)


def test_invalid_sessions_are_refused() -> None:
    with pytest.raises(LawError, match="looks ahead"):
        Sessions(stack("noncausal"))
    with pytest.raises(ConfigError, match="session 'a' does not exist"):
        Sessions(stack()).state("a")
    with pytest.raises(ConfigError, match=r"the state for session 'a' has shapes \[\[1, 2\]\], not"):
        Sessions(stack()).restore("a", (torch.zeros(1, 2),))
    assert Sessions(stack()).feed({}) == {}


def strided_stack() -> Stack:
    blocks = [StackFrames(2), LSTM(6, 4), CausalConv(4, 4, 5, 3), PoolTime(1), LSTM(4, 2)]
    return initialize(Stack(blocks).double(), 5)


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_sessions_of_a_strided_model_equal_the_whole(data: st.DataObject) -> None:
    model, streams = strided_stack(), {name: torch.randn(7 + 9 * name, 3).double() for name in range(3)}
    sessions, fed = Sessions(model), dict.fromkeys(streams, 0)
    outputs: dict[int, list[Tensor]] = {name: [] for name in streams}
    while any(fed[name] < len(stream) for name, stream in streams.items()):
        sizes = {name: data.draw(st.integers(1, 8)) for name, stream in streams.items() if fed[name] < len(stream)}
        chunks = {name: streams[name][fed[name] : fed[name] + size] for name, size in sizes.items()}
        for name, y in sessions.feed(chunks).items():
            fed[name] += len(chunks[name])
            assert y.shape == (fed[name] // 6 - sum(map(len, outputs[name])), 2)
            outputs[name].append(y)
        if data.draw(st.booleans()):  # all sessions continue elsewhere
            states = {name: sessions.state(name) for name in sizes}
            for name, state in states.items():
                sessions.close(name)
                sessions.restore(name, state)
    for name, stream in streams.items():
        y = torch.cat([*outputs[name], sessions.finish(name)])
        torch.testing.assert_close(y, whole(model, stream), rtol=1e-12, atol=1e-12)
        assert name not in sessions
    with pytest.raises(ConfigError, match="session 0 does not exist"):
        sessions.finish(0)


def test_inputs_that_do_not_fit_those_that_wait_change_no_session() -> None:
    sessions, x = Sessions(strided_stack()), torch.randn(8, 3).double()
    sessions.feed({"a": x[:4]})
    state = sessions.state("a")
    with pytest.raises(ConfigError, match=r"session 'a' has time steps of shape \[2\] and dtype .* takes features of"):
        sessions.feed({"a": x[4:, :2]})
    *pool, waiting = state
    for wrong, message in (
        (waiting[..., :2], r"time steps of shape \[2\] and dtype torch.float64, but the model takes features of shape"),
        (waiting.long(), "dtype torch.int64, but the model takes features"),
        (x.unsqueeze(0)[:, :6], r"inputs of shape \[1, 6, 3\], not \[1, time, ...\] with less than 6 time steps; use"),
        (torch.zeros(()), r"inputs of shape \[\], not"),
        (torch.cat([waiting, waiting]), r"inputs of shape \[2, 4, 3\], not"),
    ):
        with pytest.raises(ConfigError, match=message):
            sessions.restore("a", (*pool, wrong))
    with pytest.raises(ConfigError, match="the state for session 'b' has shapes"):
        sessions.restore("b", (*state, waiting))
    assert "b" not in sessions
    y = torch.cat([sessions.feed({"a": x[4:]})["a"], sessions.finish("a")])
    torch.testing.assert_close(y, whole(strided_stack(), x), rtol=1e-12, atol=1e-12)


def test_a_model_whose_inputs_are_not_known_compares_chunks() -> None:
    sessions = Sessions(Stack([PoolTime(2)]))
    sessions.feed({"a": torch.ones(1, 3)})
    with pytest.raises(ConfigError, match=r"shape \[2\] and dtype torch.float32, unlike the chunk before, whose last"):
        sessions.feed({"a": torch.ones(1, 2)})
    assert sessions.feed({"a": torch.ones(1, 3)})["a"].tolist() == [[1.0, 1.0, 1.0]]


def test_no_outputs_have_the_shape_and_dtype_of_outputs() -> None:
    for model, x in ((stack(), torch.arange(4)), (strided_stack(), torch.randn(6, 3).double())):
        expected = whole(model, x)[:0]
        fed = Sessions(model)
        fed.feed({"a": x})
        for state in (fed.state("a"), fed.state("a")[: len(fed._pool)]):  # with and without inputs that wait
            restored = Sessions(model)
            restored.restore("a", state)
            y = restored.finish("a")
            assert (y.shape, y.dtype) == (expected.shape, torch.float64)
        assert fed.finish("a").shape == expected.shape
    outputs = Sessions(strided_stack()).feed({name: torch.ones(1, 3) for name in "ab"})
    assert outputs["a"] is not outputs["b"] and outputs["a"].shape == (0, 2)


def test_array_predictions_of_a_strided_model_are_those_of_each_row() -> None:
    model, rows = strided_stack(), [torch.randn(length, 3).double().numpy() for length in (13, 1, 6, 7)]
    per_step = predict_arrays(model, rows, per_step=True)
    last = predict_arrays(model, rows)
    assert [len(y) for y in per_step] == [3, 1, 1, 2]
    for index, row in enumerate(rows):
        y = whole(model, torch.tensor(row))
        torch.testing.assert_close(torch.tensor(per_step[index]), y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.tensor(last[index]), y[-1], rtol=1e-12, atol=1e-12)
