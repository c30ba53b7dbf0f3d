"""A model of MinGRU, MinLSTM, MLSTM and SLSTM trains the same in any layout, and can be planned."""

import pytest

from helpers.rank_pool import RankPool
from stretto import Layout, World
from stretto.data import Corpus, Lanes
from stretto.measure.shapes import block_shapes
from stretto.nn import MLSTM, SLSTM, CrossEntropy, Embedding, LayerNorm, Linear, MinGRU, MinLSTM, Residual, Stack
from stretto.testing import Verification, verify


def model() -> Stack:
    cells = [MinGRU(8, 8), Residual(MinLSTM(8, 8)), MLSTM(8, 8, num_heads=2), LayerNorm(8), SLSTM(8, 8, num_heads=2)]
    return Stack([Embedding(256, 8), *cells, Linear(8, 256)]).double()


def on_rank(world: World, folder: str, layout: Layout) -> Verification:
    return verify(model(), CrossEntropy(), Lanes(Corpus.open(folder), 8, 12), layout, world, num_steps=3)


@pytest.mark.parametrize("layout", [Layout(micro_batches=3, chunks=5), Layout(chunks=4, recompute=True)], ids=str)
def test_chunks_and_micro_batches_change_nothing(layout: Layout, byte_corpus: Corpus) -> None:
    verification = verify(model(), CrossEntropy(), Lanes(byte_corpus, 8, 12), layout, num_steps=3)
    assert verification.is_equal, verification.verdict


@pytest.mark.long
@pytest.mark.short
def test_two_stages_change_nothing(byte_corpus: Corpus) -> None:
    ranks = RankPool(2)
    verifications = ranks.run(on_rank, str(byte_corpus.location), Layout(stages=2, chunks=4))
    assert all(verification.is_equal for verification in verifications), verifications[0].verdict
    ranks.close()


def test_a_plan_knows_that_only_some_cells_run_step_by_step(byte_corpus: Corpus) -> None:
    shapes = {shape.name: shape for shape in block_shapes(model().to("meta"), Lanes(byte_corpus, 8, 12))}
    assert shapes["mingru"].recurrent == shapes["mlstm"].recurrent == 0
    assert shapes["slstm"].recurrent == 2 * 4 * 16
    assert shapes["mlstm"].state == 2 * 4 * 4 + 8 + 2
    assert shapes["mingru"].saved == shapes["mlstm"].saved == 8 + 6 * 8
