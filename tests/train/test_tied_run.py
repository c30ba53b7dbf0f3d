"""A run with `model.tied`: from its config to the final weights, and what uses them."""

from pathlib import Path

import numpy as np
import onnxruntime
import torch
from safetensors.torch import load_file

from helpers.rank_pool import RankPools
from stretto import Layout, Run, World, load_model
from stretto.base.task import Task
from stretto.blocks.network import build_network
from stretto.config.run import RunConfig
from stretto.config.toml import parse_config
from stretto.data import Corpus
from stretto.engine.tied_weights import TiedWeights
from stretto.exchange import export_onnx, export_torch, from_torch, load_weights, save_weights
from stretto.nn import Rows, summarize
from stretto.testing import Verification, verify
from stretto.train.build import build_inputs

TABLE, OUTPUT = "blocks.0.module.weight", "blocks.3.module.weight"


def config_for(corpus: Corpus, folder: Path, **sections: dict[str, object]) -> RunConfig:
    base: dict[str, dict[str, object]] = {
        "data": {"train": corpus.location, "valid": corpus.location, "lanes": 8, "window": 20},
        "model": {"hidden": 12, "tied": True},
        "train": {"steps": 4},
        "run": {"folder": folder, "device": "cpu"},
    }
    return parse_config({name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}})


def run_all(world: World, config: RunConfig) -> None:
    for _ in Run(config, world).events():
        pass


def test_a_tied_run_on_two_stages_has_the_weights_of_one_device(
    word_corpus: Corpus, tmp_path: Path, pools: RankPools
) -> None:
    alone = config_for(word_corpus, tmp_path / "one")
    staged = config_for(word_corpus, tmp_path / "two", layout={"stages": 2, "chunks": 2})
    run_all(World(0, 1, torch.device("cpu")), alone)
    pools[2].run(run_all, staged)
    expected, actual = (load_file(config.run.folder / "weights.safetensors") for config in (alone, staged))
    assert TABLE in expected and OUTPUT not in expected, "saved once"
    torch.testing.assert_close(actual, expected)

    # Another run can start from these weights, on other stages.
    initial: dict[str, object] = {"hidden": 12, "tied": True, "weights": str(alone.run.folder / "weights.safetensors")}
    little: dict[str, object] = {"steps": 1, "lr": 1e-12}
    further = config_for(word_corpus, tmp_path / "further", model=initial, layout={"stages": 2}, train=little)
    pools[2].run(run_all, further)
    torch.testing.assert_close(load_file(further.run.folder / "weights.safetensors"), expected)


def verify_without_sums(world: World, config: RunConfig) -> Verification:
    """Each stage keeps its own part of the gradient, as if its weight were not tied."""
    sum_gradients, TiedWeights.sum_gradients = TiedWeights.sum_gradients, lambda self: None  # type: ignore[method-assign]
    try:
        return verify_stages(world, config)
    finally:
        TiedWeights.sum_gradients = sum_gradients  # type: ignore[method-assign]


def verify_stages(world: World, config: RunConfig) -> Verification:
    inputs = build_inputs(config)
    return verify(inputs.model.double(), inputs.loss, inputs.train.windows, Layout(stages=2, chunks=2), world)


def test_verify_compares_each_copy_of_a_tied_weight(word_corpus: Corpus, tmp_path: Path, pools: RankPools) -> None:
    config = config_for(word_corpus, tmp_path / "run")
    assert all(verification.is_equal for verification in pools[2].run(verify_stages, config))
    for verification in pools[2].run(verify_without_sums, config):
        assert not verification.is_equal
        assert [block.index for block in verification.blocks if block.gradients > 1e-9] == [0, 3]


def test_the_model_of_a_tied_run_is_tied_and_can_be_exported(word_corpus: Corpus, tmp_path: Path) -> None:
    config = config_for(word_corpus, tmp_path / "run")
    run_all(World(0, 1, torch.device("cpu")), config)
    checkpoint = max((tmp_path / "run" / "checkpoints").iterdir())
    for path in (tmp_path / "run", checkpoint):
        stack = load_model(path).stack
        assert stack.get_parameter(OUTPUT) is stack.get_parameter(TABLE)
    num_tokens = len(word_corpus.vocabulary)
    summary = summarize(stack)
    assert summary.num_weights == sum(weight.numel() for weight in stack.parameters())
    assert summary.blocks[-1].num_weights == num_tokens, "the bias"

    tokens = torch.randint(num_tokens, (5, 2))
    y, _ = stack.eval()(tokens, stack.begin(Rows.of(2)))
    export_onnx(stack, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    states = {node.name: np.zeros((2, *node.shape[1:]), np.float32) for node in session.get_inputs()[1:]}
    (onnx_y,) = session.run(["y"], {"x": tokens.numpy(), **states})
    np.testing.assert_allclose(onnx_y, y.detach().numpy(), rtol=1e-4, atol=1e-5)
    export_torch(stack, tmp_path / "torch.safetensors")
    imported = from_torch(tmp_path / "torch.safetensors")
    torch.testing.assert_close(imported(tokens, imported.begin(Rows.of(2)))[0], y)
    save_weights(stack, tmp_path / "again.safetensors")
    with torch.device("meta"):
        again = build_network(config.model, Task.language(num_tokens))
    load_weights(again, tmp_path / "again.safetensors")
    assert again.get_parameter(OUTPUT) is again.get_parameter(TABLE)
    assert torch.equal(again.state_dict()[OUTPUT], stack.state_dict()[TABLE])
