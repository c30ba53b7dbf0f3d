"""TrainedModel: a run's model on one device, from its final weights or from a checkpoint of any layout."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stretto.base.errors import ConfigError, DataError
from stretto.base.locations import is_allowed
from stretto.base.position import Position
from stretto.base.remote import is_remote
from stretto.base.run_folder import DATA_SPEC, RunFolder
from stretto.base.tf32 import use_tf32
from stretto.blocks.loss_weights import attach_loss
from stretto.blocks.pointwise import Linear
from stretto.blocks.stack import Stack
from stretto.blocks.standardize import Standardize
from stretto.blocks.ties import load_tensors
from stretto.blocks.torch_losses import as_loss
from stretto.checkpoint.checkpoint import Checkpoint, find_checkpoint
from stretto.checkpoint.shards import TensorShard
from stretto.config.layout import Layout
from stretto.config.run import DataConfig, RunConfig
from stretto.config.toml import load_config, parse_config
from stretto.engine.local import LocalEngine
from stretto.engine.precision import autocast
from stretto.mesh.device import find_device
from stretto.store.sequences import TargetValues
from stretto.train.build import build_loss, build_model
from stretto.train.data_spec import DataSpec, check_same_spec, data_spec_files, read_data_spec
from stretto.train.evaluate import Evaluation, OnWindow, evaluate
from stretto.train.feed import Feed, is_scaled, open_feed, open_feeds
from stretto.train.metrics.config_metrics import load_metrics
from stretto.train.prepare_command import prepare_command
from stretto.train.user_code import check_trusted
from stretto.train.weights import load_weights, weight_names

# The fields of [data] that say what a forecast's inputs and outputs mean.
_SERIES_FIELDS = ("horizon", "season", "targets", "masks", "scale")


@dataclass(frozen=True)
class TrainedModel:
    """The result of a run: its config, the spec of its data, and the model with its weights."""

    config: RunConfig
    data_spec: DataSpec
    stack: Stack
    is_trusted: bool = False  # whether `evaluate` may import the run's own metrics

    @property
    def raw_stack(self) -> Stack:
        """The stack with a first block that turns raw values of channels, NaN where missing, into its inputs.

        If the model predicts values of a row or time step, a last block turns its outputs into their units; forecasts
        stay scaled. The result shares the weights of `stack`, and is `stack` itself if there is nothing to scale.
        """
        channels, targets, data = self.data_spec.channels, self.data_spec.target_values, self.config.data
        last = [] if targets is None or not is_scaled(data) else [self._unscale_block(targets)]
        if channels is None:
            stack = Stack([*self.stack, *last], first=self.stack.first) if last else self.stack
            return stack.train(self.stack.training)
        ones, zeros = (1.0,) * len(channels.names), (0.0,) * len(channels.names)
        mean, std = (channels.mean, channels.std) if is_scaled(data) else (zeros, ones)
        if self.data_spec.task.targets == "horizon":
            # After the channels come the known-future ones of each time step of the horizon.
            known = [channels.names.index(name) for name in self.known_future] * data.horizon
            mean, std = (*mean, *(mean[index] for index in known)), (*std, *(std[index] for index in known))
        # Block -1, so that the others keep their indices.
        blocks = [Standardize(mean, std, masks=data.masks), *self.stack, *last]
        return Stack(blocks, first=self.stack.first - 1).train(self.stack.training)

    @property
    def num_outputs(self) -> int:
        """The number of outputs per time step that the loss needs: with quantiles, several for each value."""
        return self.data_spec.task.num_outputs * self.config.model.outputs_per_target

    @property
    def known_future(self) -> tuple[str, ...]:
        """The names of the channels whose values over the horizon are inputs: of the config, or of the data."""
        channels, names = self.data_spec.channels, self.config.data.known_future
        return (() if channels is None else channels.known_future) if names is None else names

    def metadata(self) -> dict[str, str]:
        """Return an exported model's metadata, each value as JSON: task, vocabulary, labels, channels and so on."""
        files = data_spec_files(self.data_spec)
        spec = json.loads(files.pop(DATA_SPEC))
        if self.data_spec.channels is not None:
            data = self.config.data
            spec["series"] = {name: getattr(data, name) for name in _SERIES_FIELDS}
            spec["series"]["known_future"] = self.known_future
            spec["series"]["static"] = self.data_spec.channels.static if data.static is None else data.static
        spec["quantiles"] = self.config.model.predicted_quantiles
        parts = {name: json.dumps(value, ensure_ascii=False) for name, value in spec.items() if value}
        return {**parts, **{name.removesuffix(".json"): content.decode() for name, content in files.items()}}

    def evaluate(self, location: Path | str, on_window: OnWindow = lambda fraction: None) -> Evaluation:
        """Evaluate on other prepared data, cut into windows like the run's own data."""
        check_location(location, "call stretto.evaluate(stretto.make_engine(trained.stack, loss), batches)")
        check_trusted(self.config, f"the metrics of {self.config.run.folder}", self.is_trusted, evaluates=True)
        train = self.config.data.train
        if train is not None and not is_remote(location) and Path(location).is_file():
            command = prepare_command(location, self.data_spec, train)
            raise DataError(f"{location} is a file, not a folder of prepared data; make one with `{command}`")
        feed = open_feed("data", location, self.config.data, Layout(), self.config.run.seed, is_validation=True)
        check_same_spec(self.data_spec, feed.data_spec, "the run", str(location))
        return self._evaluate_feed(feed, on_window)

    def evaluate_factory(self, on_window: OnWindow = lambda fraction: None) -> Evaluation:
        """Evaluate on the validation data that the run's `data.factory` returns; its code runs, so it needs trust."""
        name = f"data.factory={self.config.data.factory!r}"
        check_trusted(self.config, f"the data of {self.config.run.folder}", self.is_trusted, opens_data=True)
        check_trusted(self.config, f"the metrics of {self.config.run.folder}", self.is_trusted, evaluates=True)
        _, valid = open_feeds(self.config.data, Layout(), self.config.run.seed)
        if valid is None:
            raise ConfigError(f"{name} returned no validation data; return a pair of rows or windows")
        check_same_spec(self.data_spec, valid.data_spec, "the run", name)
        return self._evaluate_feed(valid, on_window)

    def _evaluate_feed(self, feed: Feed, on_window: OnWindow) -> Evaluation:
        # A loss that has weights is part of the stack.
        loss = self.stack.loss or build_loss(self.config.model, self.data_spec.task)
        # Compute about as many rows at once as a rank of the run did, so that they fit into memory.
        num_rows = feed.windows.read(Position(), inputs=False, targets=False).num_rows
        micro_batches = min(num_rows, self.config.layout.num_global_micro_batches)
        engine = LocalEngine(
            self.stack, as_loss(loss), micro_batches=micro_batches, precision=self.config.run.precision
        )
        metrics = load_metrics(self.config.metrics, self.config.model, self.data_spec.task, feed.target_std)
        with use_tf32(self.config.run.tf32):
            return evaluate(
                engine,
                feed.windows,
                on_window=on_window,
                metrics=metrics.metrics,
                class_names=self.data_spec.labels,
            )

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute in the run's precision (`run.precision` and `run.tf32`) within the context."""
        with autocast(self.stack.device, self.config.run.precision), use_tf32(self.config.run.tf32):
            yield

    def _unscale_block(self, targets: TargetValues) -> Linear:
        """Return a block that turns the stack's outputs, which are scaled values, into their units."""
        # The quantiles of a value are next to each other.
        repeats = self.config.model.outputs_per_target
        mean, std = (torch.tensor(values).repeat_interleave(repeats) for values in (targets.mean, targets.std))
        block = Linear(len(mean), len(mean))
        block.load_state_dict({"module.weight": std.diag(), "module.bias": mean})
        return block.to(self.stack.device, self.stack.dtype).requires_grad_(False)


def load_model(
    path: Path | str, device: str | None = None, *, trust: bool = False, allowed_locations: Sequence[str] = ()
) -> TrainedModel:
    """Load the model from a run's folder or from a checkpoint, whatever layout it was trained in; in eval mode.

    The weights of a finished run are its final ones; those of any other run are from its newest checkpoint. `RUN@best`
    names the checkpoint of the best evaluation (`save.keep_best`). `device` is by default the run's own
    (`run.device`). A run with `model.factory`, `model.loss` or its own metrics names Python code, which is
    imported only with `trust=True` (metrics only to evaluate): set this only if you trust the author. If the run's
    checkpoints are outside its folder (`save.to`), they are opened only if they are in one of `allowed_locations`,
    which are paths and URLs; the same applies to its `data.cache`, in place of which the default is used.
    """
    if _is_finished(path):
        folder = RunFolder(Path(path))
        config = check_trusted(load_config(folder.config), str(folder), trust)
        data_spec = read_data_spec(folder.read, str(folder))
        stack = _build_stack(config, data_spec, weight_names(folder.weights))
        load_weights(stack, folder.weights)
    else:
        checkpoint = find_checkpoint(path, allowed_locations=allowed_locations)
        config = check_trusted(_config_of(checkpoint), checkpoint.location, trust)
        data_spec = read_data_spec(checkpoint.read_file, checkpoint.location)
        names = [name.removeprefix("weights.") for name in checkpoint.manifest.tensors()]
        stack = _build_stack(config, data_spec, names)
        load_tensors(stack, read_weights(stack, checkpoint))
    config = _use_allowed_cache(config, allowed_locations)
    stack = stack.to(find_device(device or config.run.device)).eval()
    return TrainedModel(config, data_spec, stack, is_trusted=trust)


def check_location(location: object, remedy: str) -> None:
    """Raise unless data is named by its location; `remedy` says how to use rows in memory."""
    if not isinstance(location, (str, Path)):
        problem = f"location is of type {type(location).__name__}, not the path or URL of prepared data"
        raise DataError(f"{problem}; {remedy}")


def read_config(path: Path | str, allowed_locations: Sequence[str] = ()) -> RunConfig:
    """Return the config of a run's folder or of a checkpoint, without loading the model."""
    if _is_finished(path):
        return load_config(RunFolder(Path(path)).config)
    return _config_of(find_checkpoint(path, allowed_locations=allowed_locations))


def _build_stack(config: RunConfig, data_spec: DataSpec, saved_names: Iterable[str]) -> Stack:
    """Return the model on the meta device, with its loss if that has weights."""
    stack = build_model(config.model, data_spec.task)
    # A user's loss without weights is not imported: predictions don't need it.
    if not any(name.startswith("loss.") for name in saved_names):
        return stack
    return attach_loss(stack, build_loss(config.model, data_spec.task))


def _is_finished(path: Path | str) -> bool:
    return not is_remote(path) and RunFolder(Path(path)).is_finished


def _config_of(checkpoint: Checkpoint) -> RunConfig:
    config = checkpoint.manifest.run_info.config
    if config is None:
        raise ConfigError(f"{checkpoint.location} was not saved by a Run; load it with Trainer.restore")
    return parse_config(config, checkpoint.location)


def read_weights(model: Stack, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the weights in a checkpoint, by name, on the CPU; or their averages, if it has them."""
    check_weights(model, checkpoint)
    tensors = checkpoint.manifest.tensors()
    weights: dict[str, Tensor] = {}
    shards = []
    for name, parameter in model.named_tensors().items():
        saved_name = f"average.{name}" if f"average.{name}" in tensors else f"weights.{name}"
        weights[name] = torch.empty(parameter.shape, dtype=getattr(torch, tensors[saved_name].dtype), device="cpu")
        shards.append(TensorShard(saved_name, weights[name]))
    checkpoint.read(shards)
    return weights


def check_weights(model: Stack, checkpoint: Checkpoint) -> None:
    """Raise if a checkpoint's weights, or their averages, don't have the shapes of the model's weights."""
    tensors = checkpoint.manifest.tensors()
    for name, parameter in model.named_tensors().items():
        weight = tensors.get(f"weights.{name}")
        average = tensors.get(f"average.{name}", weight)
        for saved in (weight, average):
            if saved is None or saved.full_shape != parameter.shape:
                problem = "does not have it" if saved is None else f"has it as {list(saved.full_shape)}"
                raise ConfigError(
                    f"the model has a weight {name} of shape {list(parameter.shape)}, but {checkpoint.location} "
                    f"{problem}; use the same model, or choose a different run.folder"
                )


def _use_allowed_cache(config: RunConfig, allowed_locations: Sequence[str]) -> RunConfig:
    """Return the config with the default `data.cache` unless its own is allowed: the user's data is written there."""
    if is_allowed(str(config.data.cache), allowed_locations):
        return config
    default = DataConfig.model_fields["cache"].default
    return config.model_copy(update={"data": config.data.model_copy(update={"cache": default})})
