from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.rank_pool import RankPools
from stretto import Run, StepReport, World, load_model
from stretto.config.run import RunConfig
from stretto.config.toml import parse_config
from stretto.data import Corpus
from stretto.errors import ConfigError, DataError, PreemptedError
from stretto.exchange import from_torch, save_weights
from stretto.train import Request


def config_for(corpus: Corpus, folder: Path, **sections: dict[str, object]) -> RunConfig:
    base: dict[str, dict[str, object]] = {
        "data": {"train": corpus.location, "lanes": 8, "window": 20},
        "model": {"hidden": 12},
        "train": {"steps": 3},
        "run": {"folder": folder},
    }
    return parse_config({name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}})


def losses(run: Run) -> list[float]:
    return [event.loss for event in run.events() if isinstance(event, StepReport)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of torch's own modules, for bytes."""
    torch.manual_seed(5)
    modules = [torch.nn.Embedding(256, 12), torch.nn.LSTM(12, 12, 2), torch.nn.Linear(12, 256)]
    path = tmp_path_factory.mktemp("plain") / "weights.safetensors"
    save_weights(from_torch(modules), path)
    return path


def test_a_run_starts_from_the_given_weights(byte_corpus: Corpus, plain: Path, tmp_path: Path) -> None:
    run = Run(config_for(byte_corpus, tmp_path / "run", model={"weights": str(plain)}))
    for name, tensor in load_file(plain).items():
        assert torch.equal(run.engine.stack.state_dict()[name], tensor)
    first, *_ = losses(run)
    drawn, *_ = losses(Run(config_for(byte_corpus, tmp_path / "drawn")))
    assert first != drawn


def test_initial_weights_fit_with_and_without_dropout(byte_corpus: Corpus, plain: Path, tmp_path: Path) -> None:
    run = Run(config_for(byte_corpus, tmp_path / "run", model={"weights": str(plain), "dropout": 0.3}))
    given = load_file(plain)
    assert torch.equal(run.engine.stack.state_dict()["blocks.6.module.bias"], given["blocks.3.module.bias"])
    assert torch.equal(run.engine.stack.state_dict()["blocks.4.cell.bias_hh_l0"], given["blocks.2.cell.bias_hh_l0"])
    run.close()


def test_a_run_starts_from_the_weights_of_another_run(byte_corpus: Corpus, tmp_path: Path) -> None:
    losses(Run(config_for(byte_corpus, tmp_path / "one")))
    weights = tmp_path / "one" / "weights.safetensors"
    run = Run(config_for(byte_corpus, tmp_path / "two", model={"weights": str(weights)}))
    for name, tensor in load_model(tmp_path / "one").stack.state_dict().items():
        assert torch.equal(run.engine.stack.state_dict()[name], tensor)
    run.close()


def test_initial_weights_are_not_read_again_on_resume(byte_corpus: Corpus, plain: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(plain.read_bytes())
    whole = losses(Run(config_for(byte_corpus, tmp_path / "whole", model={"weights": str(copy)})))
    config = config_for(byte_corpus, tmp_path / "run", model={"weights": str(copy)})
    run = Run(config)
    events = run.events()
    next(events)
    run.trainer.request(Request.STOP)
    with pytest.raises(PreemptedError):
        list(events)
    copy.unlink()
    rest = losses(Run(config))
    assert rest and rest == whole[-len(rest) :]


def test_initial_weights_for_a_run_that_resumes_are_refused(byte_corpus: Corpus, plain: Path, tmp_path: Path) -> None:
    losses(Run(config_for(byte_corpus, tmp_path / "run")))
    with pytest.raises(ConfigError, match="has no effect, as this run resumes from"):
        Run(config_for(byte_corpus, tmp_path / "run", model={"weights": str(plain)}))


def _begin(world: World, config: RunConfig) -> list[float]:
    return losses(Run(config, world))


@pytest.mark.long
def test_each_stage_loads_its_own_weights(byte_corpus: Corpus, plain: Path, tmp_path: Path, pools: RankPools) -> None:
    model: dict[str, object] = {"weights": str(plain), "dropout": 0.2}
    alone = losses(Run(config_for(byte_corpus, tmp_path / "alone", model=model)))
    cut = config_for(byte_corpus, tmp_path / "cut", model=model, layout={"stages": 2, "chunks": 2})
    for losses_of_rank in pools[2].run(_begin, cut):
        assert losses_of_rank == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"weights": "none.safetensors"}, r"model.weights=none.safetensors does not exist"),
        ({"layers": 3}, "the number of blocks with weights is 4 in .*, but 5 in the model"),
        ({"hidden": 16}, r"blocks.0.module.weight of shape \[256, 16\], but model.weights=.* has it as \[256, 12\]"),
        ({"cell": "gru"}, r"a weight blocks.1.cell.weight_ih_l0 of shape \[36, 12\], but .* has it as \[48, 12\]"),
        ({"residual": True}, "has no blocks.1.block.cell.weight_ih_l0"),
    ],
)
def test_weights_of_a_different_model_are_refused_before_anything_is_written(
    model: dict[str, object], sentence: str, byte_corpus: Corpus, plain: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=sentence):
        Run(config_for(byte_corpus, tmp_path / "run", model={"weights": str(plain), **model}))
    assert not (tmp_path / "run").exists()


def test_a_file_without_the_weights_of_a_stack_is_refused(byte_corpus: Corpus, plain: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    config = config_for(byte_corpus, tmp_path / "run", model={"weights": str(other)})
    other.write_bytes(b"nothing")
    with pytest.raises(DataError, match="is not a valid safetensors file"):
        Run(config)
    save_file(torch.nn.LSTM(3, 4).state_dict(), other)
    with pytest.raises(DataError, match=r"a weight bias_hh_l0, but those of a Stack are named blocks\.<index>\.<name>"):
        Run(config)
    save_file({**load_file(plain), "blocks.3.module.more": torch.zeros(1)}, other)
    with pytest.raises(DataError, match=r"has a weight blocks\.3\.module\.more, which the model lacks"):
        Run(config)
