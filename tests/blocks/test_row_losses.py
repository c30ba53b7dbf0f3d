"""CTC against torch's own on single rows, CRF against the sum over all paths; neither depends on padding."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from stretto.data import Window
from stretto.errors import ConfigError, DataError
from stretto.nn import CRF, CTCLoss, Linear, LossSum, RowLoss, Stack, as_loss
from stretto.testing import LocalEngine

NONE = -100


def ctc_batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs `[9, 5, 4]` with garbage after a row's end, targets and lengths; row 3 has no target, row 4 is empty."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(9, 5, 4, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([9, 6, 3, 5, 0])
    y[torch.arange(9).unsqueeze(1) >= lengths] = 1e3
    targets = torch.tensor([[1, 2, 2, NONE], [3, 3, 1, NONE], [2, NONE, NONE, NONE], [NONE] * 4, [NONE] * 4]).t()
    return y, targets, lengths


def test_ctc_is_the_sum_of_torchs_over_single_unpadded_rows() -> None:
    y, targets, lengths = ctc_batch()
    y.requires_grad_()
    result = CTCLoss()(y, targets, lengths)
    result.total.backward()
    gradient, y.grad = y.grad, None
    total = torch.zeros((), dtype=torch.float64)
    for row, target in enumerate([[1, 2, 2], [3, 3, 1], [2]]):
        log_probs = y[: lengths[row], row].log_softmax(-1)
        total = total + nn.CTCLoss(reduction="sum")(
            log_probs, torch.tensor(target), lengths[row], torch.tensor(len(target))
        )
    total.backward()  # type: ignore[no-untyped-call]
    assert float(result.total.detach()) == pytest.approx(float(total.detach()), rel=1e-12)
    assert int(result.count) == 7
    torch.testing.assert_close(gradient, y.grad, rtol=1e-9, atol=1e-12)


def test_a_ctc_row_that_is_too_short_is_left_out_with_a_warning() -> None:
    y, targets, lengths = ctc_batch()
    without = CTCLoss()(y[:, 1:], targets[:, 1:], lengths[1:])
    lengths[0] = 3  # for 1 2 2, which needs a blank between the two 2s
    with pytest.warns(UserWarning, match="3 symbols, 1 of them equal to the one before, need 4 time steps, not 3"):
        result = CTCLoss()(y.requires_grad_(), targets, lengths)
    assert float(result.total.detach()) == pytest.approx(float(without.total)) and int(result.count) == 4
    result.total.backward()
    loss = CTCLoss()
    with pytest.warns(UserWarning) as warned:
        for _ in range(3):
            loss(y, targets, lengths)
    assert len(warned) == 1, "once, not in every micro-batch"
    assert y.grad is not None and not y.grad[:, 0].any()
    lengths[0] = 4
    assert int(CTCLoss()(y, targets, lengths).count) == 7


def test_ctc_without_any_target_is_zero() -> None:
    y, targets, lengths = ctc_batch()
    result = CTCLoss()(y[:, 3:], targets[:, 3:], lengths[3:])
    assert (float(result.total), int(result.count)) == (0.0, 0)


@pytest.mark.parametrize(
    ("symbol", "step"), [(0, 1), (4, 1), (-1, 0), (NONE, 0)], ids=["blank", "too large", "negative", "gap"]
)
def test_ctc_refuses_targets_that_are_not_symbols(symbol: int, step: int) -> None:
    y, targets, lengths = ctc_batch()
    targets[step, 1] = symbol
    with pytest.raises(
        DataError, match=rf"target {step} of a row is {symbol}, which is not a symbol of CTCLoss\(blank=0\)"
    ):
        CTCLoss()(y, targets, lengths)


def test_row_losses_in_bf16_are_computed_in_fp32() -> None:
    y, targets, lengths = ctc_batch()
    halves = y.bfloat16()
    for loss, given in ((CTCLoss(), targets), (CRF(4), targets.new_ones(9, 5))):
        assert torch.equal(loss(halves, given, lengths).total, loss(halves.float(), given, lengths).total)
        assert loss(halves, given, lengths).total.dtype == torch.float32


def crf_batch(seed: int = 0) -> tuple[CRF, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    crf = CRF(3).double()
    with torch.no_grad():
        for weight in crf.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    lengths = torch.tensor([4, 1, 0, 3, 4])
    y = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (4, 5), generator=generator)
    targets[1, 3], targets[:, 4] = NONE, NONE  # row 3 lacks a tag, row 4 all of them
    after = torch.arange(4).unsqueeze(1) >= lengths
    y[after], targets[after] = 1e3, NONE
    return crf, y, targets, lengths


def path_scores(crf: CRF, y: Tensor, length: int) -> dict[tuple[int, ...], Tensor]:
    """The score of each sequence of tags of one row."""
    scores = {}
    for tags in product(range(crf.num_tags), repeat=length):
        score = crf.start[tags[0]] + crf.end[tags[-1]] + sum(y[step, tag] for step, tag in enumerate(tags))
        scores[tags] = score + sum(crf.transitions[tags[i], tags[i + 1]] for i in range(length - 1))
    return scores


@pytest.mark.parametrize("seed", range(3))
def test_crf_is_the_log_of_a_fraction_of_all_paths(seed: int) -> None:
    crf, y, targets, lengths = crf_batch(seed)
    y.requires_grad_()
    result = crf(y, targets, lengths)
    result.total.backward()
    gradients = [leaf.grad for leaf in (y, *crf.parameters())]
    y.grad = None
    crf.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for row, length in enumerate(lengths.tolist()):
        if length:
            given = targets[:length, row].tolist()
            scores = path_scores(crf, y[:, row], length)
            matching = [
                score
                for tags, score in scores.items()
                if all(tag in (NONE, own) for tag, own in zip(given, tags, strict=True))
            ]
            total = total + torch.stack(list(scores.values())).logsumexp(0) - torch.stack(matching).logsumexp(0)
    total.backward()  # type: ignore[no-untyped-call]
    assert float(result.total.detach()) == pytest.approx(float(total.detach()), rel=1e-12)
    assert int(result.count) == 4 + 1 + 2
    for gradient, leaf in zip(gradients, (y, *crf.parameters()), strict=True):
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_crf_decodes_the_path_with_the_highest_score(seed: int) -> None:
    crf, y, targets, lengths = crf_batch(seed)
    tags = crf.decode(y, lengths)
    num_correct = 0
    for row, length in enumerate(lengths.tolist()):
        scores = path_scores(crf, y[:, row], length) if length else {(): y.new_zeros(())}
        best = max(scores, key=lambda path: float(scores[path].detach()))
        assert tags[:, row].tolist() == [*best, *[NONE] * (4 - length)]
        num_correct += sum(tag == given for tag, given in zip(best, targets[:, row].tolist(), strict=False))
    with torch.no_grad():
        assert int(crf(y, targets, lengths).num_correct) == num_correct


def test_crf_agrees_with_a_softmax_if_tags_do_not_depend_on_each_other() -> None:
    crf, y, targets, lengths = crf_batch()
    for weight in crf.parameters():
        nn.init.zeros_(weight)
    expected = nn.functional.cross_entropy(y.flatten(0, 1), targets.flatten(), reduction="sum")
    assert float(crf(y, targets, lengths).total.detach()) == pytest.approx(float(expected))


def test_sizes_that_do_not_fit_are_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"CRF\(4\) needs an output per tag, but the model has 3"):
        CRF(4)(torch.zeros(2, 1, 3), torch.zeros(2, 1, dtype=torch.int64), torch.tensor([2]))
    with pytest.raises(DataError, match="targets have the tag 3, but CRF has 3"):
        CRF(3)(torch.zeros(2, 1, 3), torch.full((2, 1), 3), torch.tensor([2]))
    with pytest.raises(ConfigError, match="blank=-1 must not be negative"):
        CTCLoss(-1)
    with pytest.raises(ConfigError, match="num_tags=0 must be at least 1"):
        CRF(0)
    with pytest.raises(ConfigError, match=r"use stretto.nn.CTCLoss\(\)"):
        as_loss(nn.CTCLoss())


class MeanOfRows(RowLoss):
    def forward(self, y: Tensor, targets: Tensor, lengths: Tensor) -> LossSum:
        return y.mean()  # type: ignore[return-value]


def test_a_row_loss_that_returns_a_tensor_is_refused() -> None:
    engine = LocalEngine(Stack([Linear(2, 2)]), MeanOfRows())
    window = Window(
        2, torch.arange(1), torch.tensor([2]), torch.ones(1, dtype=torch.bool), torch.zeros(2, 1, 2), torch.zeros(1, 1)
    )
    with pytest.raises(ConfigError, match="the loss MeanOfRows returned an object of type Tensor"):
        engine.step(window, None, 0)
