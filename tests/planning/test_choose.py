"""Choosing a layout on running ranks: all agree, the engine takes it, and the profile is cached."""

from pathlib import Path

import pytest
import torch

from helpers.rank_pool import RankPools
from stretto import World, choose_layout, make_engine
from stretto.base.position import Position
from stretto.data import Corpus, Lanes
from stretto.errors import PlanError
from stretto.measure.profile_input import ProfileInput
from stretto.nn import LSTM, CrossEntropy, Embedding, Linear, Stack
from stretto.plan.profile import load_profile
from stretto.planning import choose


def choose_and_step(world: World, corpus: str, cache: str) -> tuple[str, float]:
    windows = Lanes(Corpus.open(corpus), 8, 16)
    with torch.device("meta"):
        model = Stack([Embedding(256, 16), LSTM(16, 16), LSTM(16, 16), Linear(16, 256)])
    loss = CrossEntropy()
    layout = choose_layout(model, loss, windows, world=world, optimizer=torch.optim.SGD, cache=Path(cache))
    engine = make_engine(model, loss, layout, world, seed=1)
    share = windows.share(engine.mesh.replica, layout.replicas, layout.micro_batches)
    result = engine.step(share.read(Position()), None, 1)
    return str(layout), engine.mesh.world.all_reduce([result.total.item()])[0]


@pytest.mark.long
@pytest.mark.short
def test_all_ranks_choose_the_same_layout_and_the_engine_takes_it(
    pools: RankPools, byte_corpus: Corpus, tmp_path: Path
) -> None:
    first, second = pools[2].run(choose_and_step, str(byte_corpus.store.location), str(tmp_path))
    assert first == second
    assert len(list((tmp_path / "profiles").iterdir())) == 1


@pytest.mark.long
@pytest.mark.short
def test_a_cached_profile_is_not_measured_again(
    byte_corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = World(0, 1, torch.device("cpu"))
    arguments = alone, str(byte_corpus.store.location), str(tmp_path)
    layout, _ = choose_and_step(*arguments)
    monkeypatch.setattr(choose, "measure_on_ranks", lambda *_: pytest.fail("measured again"))
    assert choose_and_step(*arguments)[0] == layout


@pytest.mark.long
def test_a_damaged_cached_profile_is_measured_again(byte_corpus: Corpus, tmp_path: Path) -> None:
    arguments = World(0, 1, torch.device("cpu")), str(byte_corpus.store.location), str(tmp_path)
    choose_and_step(*arguments)
    (path,) = (tmp_path / "profiles").iterdir()
    path.write_text("{")
    choose_and_step(*arguments)
    assert load_profile(path).blocks


def test_a_model_that_fits_in_no_layout_is_an_error_of_one_sentence(
    byte_corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProfileInput, "device_memory", 1e4)
    with pytest.raises(PlanError) as error:
        choose_and_step(World(0, 1, torch.device("cpu")), str(byte_corpus.store.location), str(tmp_path))
    assert str(error.value) == (
        "no layout is possible with devices=1 (1 stage: a rank needs more than 10 kB); "
        "use more devices or memory, or a smaller model"
    )
