"""Losses that contain the output layer: the fused linear cross-entropy and the adaptive softmax."""

import copy

import pytest
import torch
from torch import Tensor, nn

from helpers.layout_cases import NUM_TOKENS, WIDTH, Case, RandomWindows
from helpers.rank_pool import RankPools
from stretto import Layout, World
from stretto.errors import ConfigError, DataError
from stretto.exchange import export_torch
from stretto.nn import LSTM, AdaptiveSoftmax, CrossEntropy, Embedding, HeadLoss, LinearCrossEntropy, Rows, Stack
from stretto.serve import Sampling, generate_tokens
from stretto.testing import check_loss, verify

FEATURES, CLASSES = 6, 50


def hidden_and_targets(num_steps: int = 7, num_rows: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(num_steps, num_rows, FEATURES, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(CLASSES, (num_steps, num_rows))
    targets[2:4, 1] = -100
    return hidden, targets


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("max_logits", [1, 3 * CLASSES, 10**6])
def test_the_fused_loss_equals_a_linear_layer_and_cross_entropy(bias: bool, max_logits: int) -> None:
    hidden, targets = hidden_and_targets()
    fused = LinearCrossEntropy(FEATURES, CLASSES, bias=bias, max_logits=max_logits).double()
    plain = copy.deepcopy(fused.module)
    expected = CrossEntropy()(plain(hidden), targets)
    torch.autograd.backward(3 * expected.total)
    hidden_gradient, hidden.grad = hidden.grad, None
    actual = fused(hidden, targets)
    torch.autograd.backward(3 * actual.total)
    assert int(actual.count) == int(expected.count) == 26
    torch.testing.assert_close(actual.total, expected.total, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(hidden.grad, hidden_gradient, rtol=1e-9, atol=1e-9)
    for weight, other in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        evaluated, reference = fused(hidden, targets), CrossEntropy()(plain(hidden), targets)
    torch.testing.assert_close(evaluated.total, reference.total, rtol=1e-9, atol=1e-9)
    assert evaluated.num_correct == reference.num_correct
    torch.testing.assert_close(fused.log_prob(hidden), plain(hidden).log_softmax(-1))


def test_with_weights_in_bf16_the_fused_loss_sums_in_float32() -> None:
    hidden, targets = hidden_and_targets(num_steps=200, num_rows=8)
    states = hidden.detach().bfloat16()
    fused = LinearCrossEntropy(FEATURES, CLASSES, max_logits=3 * CLASSES).bfloat16()
    plain = copy.deepcopy(fused.module)
    actual, expected = fused(states, targets), CrossEntropy()(plain(states), targets)
    assert actual.total.dtype == torch.float32
    torch.testing.assert_close(actual.total, expected.total, rtol=1e-5, atol=0)
    torch.autograd.backward([actual.total, expected.total])
    for weight, other in zip(fused.parameters(), plain.parameters(), strict=True):
        assert weight.grad is not None and other.grad is not None
        # Two roundings to bf16; the sum of all parts in bf16 would be off by several of them.
        difference = (weight.grad - other.grad).abs().max() / other.grad.abs().max()
        assert float(difference) <= 2**-7
    with torch.no_grad():
        torch.testing.assert_close(fused(states, targets).total, expected.total.detach(), rtol=1e-5, atol=0)
    adaptive = AdaptiveSoftmax(FEATURES, CLASSES, (10,)).bfloat16()
    assert adaptive(states, targets).total.dtype == torch.float32


def saved_bytes(loss: nn.Module, hidden: Tensor, targets: Tensor) -> int:
    """Return the bytes that a forward keeps for its backward, without weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in loss.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            kept[place] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        total = loss(hidden, targets).total
    assert total.requires_grad
    return sum(kept.values())


class Unfused(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: Tensor, targets: Tensor) -> object:
        return CrossEntropy()(self.linear(hidden), targets)


def test_the_fused_loss_keeps_no_logits() -> None:
    hidden, targets = hidden_and_targets(num_steps=64, num_rows=8)
    fused = LinearCrossEntropy(FEATURES, CLASSES, max_logits=16 * CLASSES).double()
    logits = 64 * 8 * CLASSES * 8
    assert saved_bytes(fused, hidden, targets) <= 64 * 8 * (FEATURES + 2) * 8, "hidden states, labels and log-sums"
    assert saved_bytes(Unfused(fused.module), hidden, targets) >= logits


def test_the_adaptive_softmax_is_torchs() -> None:
    hidden, targets = hidden_and_targets()
    loss = AdaptiveSoftmax(FEATURES, CLASSES, (10, 30), div_value=2.0).double()
    is_valid = targets != -100
    expected = loss.softmax(hidden[is_valid], targets[is_valid])
    actual = loss(hidden, targets)
    torch.testing.assert_close(actual.total / actual.count, expected.loss, rtol=1e-9, atol=1e-9)
    log_probabilities = loss.log_prob(hidden)
    torch.testing.assert_close(log_probabilities.exp().sum(-1), torch.ones(7, 4, dtype=torch.float64))
    picked = log_probabilities[is_valid].gather(1, targets[is_valid].unsqueeze(1))
    torch.testing.assert_close(-picked.sum(), actual.total, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        evaluated = loss(hidden, targets)
    assert int(evaluated.num_correct) == int((log_probabilities.argmax(-1) == targets).sum())
    empty = loss(hidden, torch.full_like(targets, -100))
    assert float(empty.total.detach()) == 0 and int(empty.count) == 0
    check_loss(loss, hidden.detach(), targets)


def make(name: str) -> HeadLoss:
    if name == "fused":
        return LinearCrossEntropy(WIDTH, NUM_TOKENS, max_logits=5 * NUM_TOKENS)
    return AdaptiveSoftmax(WIDTH, NUM_TOKENS, (5, 12), div_value=2.0)


def verify_layout(world: World, name: str, layout: Layout) -> tuple[bool, str, float]:
    model = Stack([Embedding(NUM_TOKENS, WIDTH), LSTM(WIDTH, WIDTH), LSTM(WIDTH, WIDTH)]).double()
    result = verify(model, make(name), RandomWindows(Case()), layout, world, num_steps=2)
    return result.is_equal, result.verdict, result.loss


@pytest.mark.parametrize("name", ["fused", "adaptive"])
@pytest.mark.parametrize("layout", [Layout(stages=2, micro_batches=2, chunks=3), Layout(replicas=2, chunks=2)], ids=str)
def test_every_layout_equals_one_device(name: str, layout: Layout, pools: RankPools) -> None:
    for is_equal, verdict, difference in pools[2].run(verify_layout, name, layout):
        assert is_equal, verdict
        assert difference < 1e-9


@pytest.mark.parametrize("name", ["fused", "adaptive"])
def test_a_model_whose_loss_has_the_output_layer_generates(name: str) -> None:
    loss = make(name)
    stack = Stack([Embedding(NUM_TOKENS, WIDTH), LSTM(WIDTH, WIDTH)], loss=loss)
    prompt = torch.tensor([1, 2]).numpy()
    (token,) = next(generate_tokens(stack, prompt, Sampling(temperature=0)))
    y, _ = stack(torch.tensor([[1], [2]]), stack.initial_state(Rows.of(1)))
    assert token == int(loss.log_prob(y[-1]).argmax())


@pytest.mark.parametrize("loss", [LinearCrossEntropy(FEATURES, CLASSES), AdaptiveSoftmax(FEATURES, CLASSES, (10,))])
@pytest.mark.parametrize("target", [CLASSES, -1])
@pytest.mark.parametrize("has_backward", [True, False])
def test_a_target_that_is_not_a_class_is_named(loss: HeadLoss, target: int, has_backward: bool) -> None:
    hidden, targets = hidden_and_targets()
    targets[3, 2] = target
    name = type(loss).__name__
    sentence = f"targets have the class {target}, but {name} has {CLASSES}, counted from 0; use -100 where"
    with torch.set_grad_enabled(has_backward), pytest.raises(DataError, match=sentence):
        loss(hidden.float(), targets)


def test_what_does_not_fit_is_refused() -> None:
    hidden, targets = hidden_and_targets()
    with pytest.raises(ConfigError, match="takes 7 features, but the model gives 6"):
        LinearCrossEntropy(7, CLASSES)(hidden, targets)
    with pytest.raises(ConfigError, match="integer targets"):
        LinearCrossEntropy(FEATURES, CLASSES)(hidden, targets.double())
    with pytest.raises(ConfigError, match="must increase"):
        AdaptiveSoftmax(FEATURES, CLASSES, (30, 10))
    with pytest.raises(ConfigError, match=r"div_value=0\.0 must be at least 1"):
        AdaptiveSoftmax(FEATURES, CLASSES, (10, 30), div_value=0.0)
    with pytest.raises(ConfigError, match="less than one of 6 features"):
        AdaptiveSoftmax(FEATURES, CLASSES, (10, 30))
    with pytest.raises(ConfigError, match="can't be exported"):
        export_torch(Stack([Embedding(CLASSES, FEATURES)], loss=LinearCrossEntropy(FEATURES, CLASSES)), "unused")
