"""`verify` accepts models that satisfy the laws, and names the block or loss that breaks one."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.rank_pool import RankPool
from helpers.stores import write_tokens
from stretto import Layout, World, world
from stretto.base.tf32 import fp32_precisions, use_tf32
from stretto.cli.main import main
from stretto.data import Batches, Corpus, LabeledItems, Lanes, Sequences
from stretto.errors import LawError
from stretto.launch.rank_environment import free_port
from stretto.measure.verify import BlockDifference
from stretto.nn import (
    CRF,
    GRU,
    LSTM,
    Block,
    CrossEntropy,
    Dropout,
    Embedding,
    Linear,
    LossSum,
    SquaredError,
    Stack,
    State,
)
from stretto.testing import Verification, check_loss, verify

LAYOUTS = [pytest.param(Layout(replicas=2, micro_batches=2), marks=pytest.mark.long), Layout(stages=2, chunks=4)]


class HidesState(Block):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(8, 8)
        self.h: Tensor | None = None

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        fits = self.h is not None and self.h.shape[1] == x.shape[1]
        y, h = self.cell(x, self.h if fits else None)
        self.h = h.detach()
        return y, state


def mean_loss(y: Tensor, targets: Tensor) -> LossSum:
    return LossSum(F.cross_entropy(y.flatten(0, 1), targets.flatten()), torch.tensor(1))


def lawful() -> Stack:
    return Stack([Embedding(256, 8), LSTM(8, 8), Dropout(0.2), GRU(8, 8), Linear(8, 256)])


def hiding() -> Stack:
    return Stack([Embedding(256, 8), LSTM(8, 8), HidesState(), Linear(8, 256)])


def on_rank(world: World, kind: str, folder: Path, layout: Layout) -> Verification:
    model = hiding() if kind == "hiding" else lawful()
    loss = mean_loss if kind == "mean" else CrossEntropy()
    return verify(model.double(), loss, Lanes(Corpus.open(folder), 8, 12), layout, world)


@pytest.mark.long
@pytest.mark.short
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_lawful_model_passes_and_a_broken_one_is_named(layout: Layout, byte_corpus: Corpus) -> None:
    ranks = RankPool(2)
    for kind, verdict in (
        ("lawful", "equal to the unsplit step on one rank, within 1e-09"),
        ("hiding", "block 2: HidesState breaks the chunk law"),
        ("mean", "the loss is not a sum over time"),
    ):
        verifications = ranks.run(on_rank, kind, byte_corpus.location, layout)
        assert verifications[0] == verifications[1], "every rank gets the same result"
        assert verifications[0].is_equal == (kind == "lawful")
        assert verifications[0].verdict.startswith(verdict)
    ranks.close()


def test_one_rank_alone_can_verify_micro_batches_and_chunks(byte_corpus: Corpus) -> None:
    lanes = Lanes(byte_corpus, 8, 12)
    verification = verify(lawful().double(), CrossEntropy(), lanes, Layout(micro_batches=3, chunks=5, recompute=True))
    assert verification.is_equal and [block.name for block in verification.blocks][1] == "LSTM"
    assert not verify(hiding().double(), CrossEntropy(), lanes, Layout(chunks=3)).is_equal


class LikeCudnn(Block):
    """As cuDNN's RNNs, it has no backward in eval mode; as CUDA, it rounds if TF32 is allowed."""

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        if not self.training and torch.is_grad_enabled():
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        is_exact = set(fp32_precisions().values()) == {"ieee"}
        return x * (1 if is_exact else 1 + 1e-2 * len(x)), state


def test_blocks_are_verified_in_training_mode_and_without_tf32(byte_corpus: Corpus) -> None:
    model = Stack([Embedding(256, 8), LikeCudnn(), LSTM(8, 8), Linear(8, 256)])
    with use_tf32(True):
        verification = verify(model, CrossEntropy(), Lanes(byte_corpus, 8, 12), Layout(chunks=3))
        assert verification.is_equal, verification.verdict
        assert set(fp32_precisions().values()) == {"tf32"}, "it is on again afterwards"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_lawful_model_passes_on_cuda(byte_corpus: Corpus) -> None:
    with world(1, device="cuda") as joined:
        layout = Layout(micro_batches=2, chunks=3)
        verification = verify(lawful(), CrossEntropy(), Lanes(byte_corpus, 8, 12), layout, joined)
    assert verification.is_equal, verification.verdict


def test_a_loss_with_weights_is_checked_without_a_warning_about_their_gradient() -> None:
    torch.set_warn_always(True)  # else torch warns once per process
    try:
        check_loss(CRF(3), torch.randn(5, 4, 3), torch.randint(3, (5, 4)))
    finally:
        torch.set_warn_always(False)


def test_a_loss_is_checked_by_itself() -> None:
    check_loss(SquaredError(), torch.randn(5, 4, 2), torch.randn(5, 4, 2))
    with pytest.raises(LawError, match="is not a sum over rows"):
        check_loss(lambda y, t: LossSum((y - t).square().mean(1).sum(), torch.tensor(len(y))), *torch.randn(2, 5, 4))
    with pytest.raises(LawError, match="the loss is nan, so"):
        check_loss(SquaredError(), torch.full((5, 4, 2), torch.nan), torch.randn(5, 4, 2))


def mean_of_labels(y: Tensor, targets: Tensor) -> LossSum:
    loss = CrossEntropy()(y, targets)
    return LossSum(loss.total / loss.count.clamp(min=1), loss.count)


def test_a_mean_of_labels_is_rejected_even_if_labels_are_at_the_end(tmp_path: Path) -> None:
    rows = [[token % 7 for token in range(20)] for _ in range(24)]
    write_tokens(tmp_path / "data", [rows], 7, [[row % 3 for row in range(24)]])
    data = Batches(LabeledItems(Sequences.open(tmp_path / "data")), 200)
    stack = Stack([Embedding(7, 6), LSTM(6, 5), Linear(5, 3)])
    verification = verify(stack, mean_of_labels, data, Layout())
    assert not verification.is_equal and "the loss is not a sum" in verification.verdict


def test_a_block_is_blamed_only_if_it_differs() -> None:
    for in_block, where in ((1.0, "most in block 2 (LSTM)"), (0.0, "in the loss")):
        blocks = (BlockDifference(1, "Linear", 0.0, 0.0), BlockDifference(2, "LSTM", in_block, 0.0))
        verification = Verification(Layout(), 1, 0.5, blocks, 1e-4, ())
        reason = "though no block breaks the chunk law and the loss is a sum"
        assert verification.verdict == f"differs from the step on one rank, {where}, {reason}"


def test_a_state_that_was_not_compared_is_not_called_equal() -> None:
    blocks = (BlockDifference(0, "MinGRU", 0.0, math.nan),)
    verification = Verification(Layout(spans=2), 1, 0.0, blocks, 1e-4, ())
    assert verification.is_equal and verification.verdict.endswith("in loss and gradients; spans return no state")
    differing = Verification(Layout(spans=2), 1, 0.0, (BlockDifference(0, "MinGRU", 1.0, math.nan),), 1e-4, ())
    assert not differing.is_equal and "most in block 0 (MinGRU)" in differing.verdict


def on_rank_of(world: World, folder: Path, layout: Layout) -> Verification:
    sequences = Sequences.open(folder)
    stack = Stack([Embedding(7, 6), LSTM(6, 6), Dropout(0.2), LSTM(6, 5), Linear(5, 3)]).double()
    return verify(stack, CrossEntropy(), Batches(LabeledItems(sequences), 40), layout, world, num_steps=4)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", [Layout(replicas=2, micro_batches=3), Layout(stages=2, micro_batches=2, chunks=3)], ids=str
)
def test_batches_of_unequal_rows_are_compared_row_by_row(layout: Layout, tmp_path: Path) -> None:
    rows = [[token % 7 for token in range(1 + row * row % 13)] for row in range(24)]
    write_tokens(tmp_path / "data", [rows], 7, [[row % 3 for row in range(24)]])
    ranks = RankPool(2)
    for verification in ranks.run(on_rank_of, tmp_path / "data", layout):
        assert verification.is_equal and verification.verdict.startswith(
            "equal to the unsplit step on one rank, within 1e-09"
        ), verification
    ranks.close()


@pytest.mark.long
def test_the_command_prints_the_verdict(
    byte_corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(
        f'[data]\ntrain = "{byte_corpus.location}"\nlanes = 8\nwindow = 12\n[model]\nhidden = 8\ndropout = 0.1\n'
    )
    assert main(["verify", "run.toml", "--layout.stages", "2", "--layout.chunks", "3", "--double"]) == 0
    assert "equal to the unsplit step on one rank, within 1e-09" in capfd.readouterr().out
    Path("mine.py").write_text(
        "import torch, stretto\n"
        "class Mean(stretto.nn.Block):\n    def forward(self, x, state):\n        return x - x.mean(0), state\n"
        "def build(task):\n    n = task.num_inputs\n"
        "    return stretto.nn.Stack([stretto.nn.Embedding(n, 4), Mean(), stretto.nn.Linear(4, n)])\n"
    )
    assert main(["verify", "run.toml", "--layout.replicas", "2", "--model.factory", "mine.py:build"]) == 1
    error = capfd.readouterr().err
    assert error.startswith("stretto: error: block 1: Mean breaks the chunk law: when cut in time")
    assert error.count("\n") == 1


@pytest.mark.long
def test_all_ranks_end_with_the_law_error_of_one(byte_corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f'[data]\ntrain = "{byte_corpus.location}"\nlanes = 8\nwindow = 12\n')
    (tmp_path / "mine.py").write_text(
        "import stretto\n"
        "class OnlyOutput(stretto.nn.Block):\n    def forward(self, x, state):\n        return x\n"
        "def build(task):\n    n = task.num_inputs\n"
        "    return stretto.nn.Stack([stretto.nn.Embedding(n, 4), stretto.nn.Linear(4, n), OnlyOutput()])\n"
    )
    # Only the last stage has the block that breaks the law; the first waits for it, and no launcher ends it.
    options = ["--layout.stages", "2", "--layout.blocks", "1,2", "--model.factory", "mine.py:build"]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "stretto", "verify", "run.toml", *options],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = "".join(rank.communicate(timeout=120)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [2, 2], errors
    assert errors.startswith("stretto: error: OnlyOutput.forward did not return (y, state)")
    assert errors.count("\n") == 1, errors
