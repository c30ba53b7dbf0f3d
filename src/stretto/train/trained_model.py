"""Trained: a run's model for use, on one device, from its weights or from a checkpoint of any layout."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.position import Position
from stretto.base.remote import is_remote
from stretto.base.run_folder import DATA_SPEC, RunFolder
from stretto.blocks.stack import Stack
from stretto.checkpoint.checkpoint import Checkpoint, find_checkpoint
from stretto.checkpoint.shards import TensorShard
from stretto.config.layout import Layout
from stretto.config.run import RunConfig
from stretto.config.toml import load_config, parse_config
from stretto.engine.local import LocalEngine
from stretto.mesh.device import find_device
from stretto.train.build import build_loss, build_model
from stretto.train.data_spec import DataSpec, check_same_spec, data_spec_files, read_data_spec
from stretto.train.evaluate import Evaluation, OnWindow, evaluate
from stretto.train.feed import open_feed
from stretto.train.weights import load_weights


@dataclass(frozen=True)
class TrainedModel:
    """What a run has come to: its config, what its data was about, and the stack with its weights."""

    config: RunConfig
    data_spec: DataSpec
    stack: Stack

    def metadata(self) -> dict[str, str]:
        """Return the names behind the model's numbers, each as JSON: what an export carries with it."""
        files = data_spec_files(self.data_spec)
        tree = json.loads(files.pop(DATA_SPEC))
        if self.data_spec.channels is not None:
            data = self.config.data
            tree["series"] = {name: getattr(data, name) for name in ("horizon", "season", "targets", "masks")}
        found = {name: json.dumps(value, ensure_ascii=False) for name, value in tree.items() if value}
        return {**found, **{name.removesuffix(".json"): content.decode() for name, content in files.items()}}

    def evaluate(self, location: Path | str, on_window: OnWindow = lambda part: None) -> Evaluation:
        """Return the loss on other data, cut as the run's own was."""
        alone = self.config.model_copy(update={"layout": Layout()})
        feed = open_feed(alone, location, "data", is_validation=True)
        check_same_spec(self.data_spec, feed.data_spec, str(location), "the run")
        loss = build_loss(self.config, self.data_spec.task)
        # As many rows at once as a rank of the run had.
        rows = feed.windows.read(Position(), inputs=False, targets=False).num_rows
        micro_batches = min(rows, self.config.layout.num_global_micro_batches)
        engine = LocalEngine(self.stack, loss, micro_batches=micro_batches, precision=self.config.run.precision)
        return evaluate(engine, feed.windows, on_window=on_window)


def load_model(path: Path | str, device: str | None = None, *, trust: bool = False) -> TrainedModel:
    """Load a model whole onto one device: of a run's folder, or of a checkpoint, whichever layout wrote it.

    Of a run that has finished these are its final weights, else those of its newest checkpoint. A run with a
    `model.factory` or a `model.loss` names code, which is run only if you say that you `trust` whoever wrote it.
    """
    if _is_finished(path):
        folder = RunFolder(Path(path))
        config = _check_trusted(load_config(folder.config), str(folder), trust)
        data_spec = read_data_spec(folder.read, str(folder))
        stack = build_model(config, data_spec.task)
        load_weights(stack, folder.weights)
    else:
        saved = find_checkpoint(path)
        config = _check_trusted(_config_of(saved), saved.location, trust)
        data_spec = read_data_spec(saved.read_file, saved.location)
        stack = build_model(config, data_spec.task)
        stack.load_state_dict(read_weights(stack, saved), assign=True)
    return TrainedModel(config, data_spec, stack.to(find_device(device or config.run.device)))


def read_config(path: Path | str) -> RunConfig:
    """Read the config of a run's folder or of a checkpoint, and nothing else."""
    return load_config(RunFolder(Path(path)).config) if _is_finished(path) else _config_of(find_checkpoint(path))


def _is_finished(path: Path | str) -> bool:
    return not is_remote(path) and RunFolder(Path(path)).is_finished


def _config_of(saved: Checkpoint) -> RunConfig:
    if saved.manifest.run_info.config is None:
        raise ConfigError(f"{saved.location} was not saved by `stretto train`; read it with Trainer.restore")
    return parse_config(saved.manifest.run_info.config, saved.location)


def read_weights(model: Stack, saved: Checkpoint) -> dict[str, Tensor]:
    """Return the weights in a checkpoint, by name, on the CPU; of a run that averages them, the averages."""
    check_weights(model, saved)
    tensors = saved.manifest.tensors()
    found: dict[str, Tensor] = {}
    shards = []
    for name, like in model.state_dict().items():
        average = f"optimizer.{name}.ax"
        full = average if average in tensors else f"weights.{name}"
        found[name] = torch.empty(like.shape, dtype=getattr(torch, tensors[full].dtype), device="cpu")
        shards.append(TensorShard(full, found[name]))
    saved.read(shards)
    return found


def check_weights(model: Stack, saved: Checkpoint) -> None:
    """Refuse a checkpoint of a model of another shape, before any memory is asked for."""
    tensors = saved.manifest.tensors()
    for name, like in model.state_dict().items():
        part = tensors.get(f"weights.{name}")
        average = tensors.get(f"optimizer.{name}.ax", part)
        shapes = [None if found is None else list(found.full_shape) for found in (part, average)]
        if shapes != [list(like.shape)] * 2:
            there = "has none" if part is None else f"has it as {shapes[0]}"
            raise ConfigError(
                f"the model has a weight {name} of {list(like.shape)}, but {saved.location} {there}; use the same model, "
                "or choose another --run.folder"
            )


def _check_trusted(config: RunConfig, where: str, trust: bool) -> RunConfig:
    """Refuse a config that names code to be run, unless its writer is trusted."""
    for name, value in (("factory", config.model.factory), ("loss", config.model.loss)):
        if value is not None and not trust:
            raise ConfigError(
                f"{where} runs code of its own (model.{name}={value!r}); if you trust it, pass trust=True, or --trust"
            )
    return config
