"""A checkpoint's safetensors files are read by torch's own tools, also where ranks have cut a tensor between rows."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import hf_storage, state_dict_loader
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

from helpers.rank_pool import RankPools
from helpers.restoring_ranks import SavedModel, make_trainer, save
from stretto import Layout, World
from stretto.blocks.stack import Stack
from stretto.checkpoint import find_checkpoint

ONE_DEVICE = World(0, 1, torch.device("cpu"))
MODEL = SavedModel(optimizer="sgd")


@pytest.fixture(scope="module")
def folder(pools: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of two replicas, which have cut a weight between them."""
    location = tmp_path_factory.mktemp("run")
    pools[2].run(save, location, Layout(replicas=2), MODEL)
    checkpoint = find_checkpoint(location)
    saved = checkpoint.manifest
    first, second = ({shard.name: shard for shard in saved.shards(file, "")} for file in saved.files if file.groups)
    cut = [name for name in first.keys() & second.keys() if name.startswith("weights.")]
    assert cut and all(first[name].rows.stop == second[name].rows.start for name in cut)
    return Path(checkpoint.location)


@pytest.fixture(scope="module")
def restored(folder: Path) -> Stack:
    """The model that stretto itself restores, on one device."""
    trainer = make_trainer(ONE_DEVICE, Layout(), MODEL)
    trainer.restore(find_checkpoint(folder))
    return trainer.engine.stack


def test_torch_loads_the_checkpoint_of_two_ranks_into_the_module_of_one_device(folder: Path, restored: Stack) -> None:
    stack = make_trainer(ONE_DEVICE, Layout(), MODEL).engine.stack
    state = {f"weights.{name}": tensor for name, tensor in stack.state_dict().items()}
    state_dict_loader.load(state, storage_reader=hf_storage.HuggingFaceStorageReader(str(folder)))
    assert [*stack.state_dict()] == [*restored.state_dict()]
    for name, tensor in stack.state_dict().items():
        assert torch.equal(tensor, restored.state_dict()[name]), name


def test_torch_consolidates_the_files_of_two_ranks_into_one(folder: Path, restored: Stack, tmp_path: Path) -> None:
    weights = {f"weights.{name}": tensor for name, tensor in restored.state_dict().items()}
    consolidate_safetensors_files(str(folder), str(tmp_path), dict.fromkeys(weights, 1))
    consolidated = load_file(tmp_path / "model-00001-of-00001.safetensors")
    assert consolidated.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(consolidated[name], tensor), name
