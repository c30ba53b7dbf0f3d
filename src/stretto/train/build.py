"""Build: what a config asks for, put together and checked before any rank waits for another."""

import torch

from stretto.base.errors import ConfigError, StrettoError
from stretto.base.task import Task
from stretto.blocks.losses import Loss, LossSum, SequenceLoss, SquaredError, TokenLoss
from stretto.blocks.network import build_network
from stretto.blocks.pointwise import Embedding, Linear
from stretto.blocks.stack import Stack
from stretto.config.run import RunConfig
from stretto.engine.build import make_engine, stage_parts
from stretto.engine.pipeline import PipelineEngine
from stretto.engine.replica import ReplicaEngine
from stretto.mesh.world import World
from stretto.plan.fit import fit_layout
from stretto.train.feed import Feed, open_feeds
from stretto.train.user_code import load_object


def fit_to_ranks(config: RunConfig, num_ranks: int) -> RunConfig:
    """Return the config with a layout for so many ranks, if it is elastic; as it is, if it is not or fits already."""
    if config.layout.auto or not config.layout.elastic or config.layout.num_ranks == num_ranks:
        return config
    # Rows of one rank: whatever is held out or packed, lanes are the only ones that can be too few.
    alone = config.model_copy(update={"layout": config.layout.model_copy(update={"replicas": 1, "stages": 1})})
    train, _ = open_feeds(alone)
    model = build_model(config, train.data_spec.task)
    num_rows = train.windows.lanes or num_ranks * config.layout.micro_batches
    return config.model_copy(update={"layout": fit_layout(config.layout, num_ranks, len(model), num_rows)})


def validate_config(config: RunConfig) -> tuple[Stack, Feed, Feed | None]:
    """Check all that can be checked without a device; return the model on the meta device and the data of all ranks.

    What is wrong is found here on every rank alike, or, by a command that is about to start ranks, just once.
    """
    train, valid = open_feeds(config)
    model = build_model(config, train.data_spec.task)
    stage_parts(model, config.layout)
    build_loss(config, train.data_spec.task)
    if not model.causal and train.windows.is_stateful:
        raise ConfigError(
            "the model has a block that looks ahead in time (causal=False), but lanes go on from window to window; "
            "use causal blocks"
        )
    if train.windows.is_stateful and config.layout.chunks > config.data.window:
        raise ConfigError(f"layout.chunks={config.layout.chunks} exceeds data.window={config.data.window}; use fewer")
    return model, train, valid


def build_model(config: RunConfig, task: Task) -> Stack:
    """Return the model that a config describes, on the meta device: no rank has to hold all of it."""
    try:
        with torch.device("meta"):
            if config.model.factory is None:
                return build_network(config.model, task)
            factory = load_object("model.factory", config.model.factory)
            model = factory(task) if callable(factory) else factory
    except StrettoError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises
        what = "the model" if config.model.factory is None else f"model.factory={config.model.factory!r}"
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"{what} can't be built ({reason}); it is called with a stretto.data.Task") from None
    if not isinstance(model, Stack):
        raise ConfigError(
            f"model.factory={config.model.factory!r} gave a {type(model).__name__}; return a stretto.nn.Stack"
        )
    _check_input_and_output_sizes(model, config, task)
    return model


def _check_input_and_output_sizes(model: Stack, config: RunConfig, task: Task) -> None:
    """Refuse a model of the user's that has no room for all tokens or labels: a loss would fail in words of its own."""
    spec, first, last = f"model.factory={config.model.factory!r}", model[0], model[len(model) - 1]
    if isinstance(first, Embedding) and task.inputs == "tokens" and first.num_tokens < task.num_inputs:
        raise ConfigError(
            f"{spec} begins with an Embedding of {first.num_tokens} tokens, but the data has {task.num_inputs}; make "
            "it task.num_inputs wide"
        )
    if not isinstance(last, Linear) or config.model.loss is not None or task.targets == "values":
        return
    if last.num_outputs < task.num_outputs:
        raise ConfigError(
            f"{spec} ends with a Linear of {last.num_outputs} features, but the data asks for {task.num_outputs}; make "
            "it task.num_outputs wide"
        )


def build_loss(config: RunConfig, task: Task) -> Loss:
    """Return the loss that a config names: the user's own, or else that of what the data asks."""
    if config.model.loss is None:
        usual: dict[str, Loss] = {"tokens": TokenLoss(), "labels": SequenceLoss(), "values": SquaredError()}
        return usual[task.targets]
    loss = load_object("model.loss", config.model.loss)
    if not callable(loss):
        raise ConfigError(f"model.loss={config.model.loss!r} can't be called; name a function of (outputs, targets)")

    def checked(y: torch.Tensor, targets: torch.Tensor) -> LossSum:
        found = loss(y, targets)
        if not isinstance(found, LossSum):
            raise ConfigError(
                f"model.loss={config.model.loss!r} gave no stretto.nn.LossSum; return LossSum(total, count)"
            )
        return found

    return checked


def build_engine(model: Stack, config: RunConfig, task: Task, world: World) -> PipelineEngine | ReplicaEngine:
    """Return this rank's engine, its weights drawn by seed and name."""
    try:
        return make_engine(
            model, build_loss(config, task), config.layout, world, seed=config.run.seed, precision=config.run.precision
        )
    except RuntimeError as error:
        if "alloc" not in str(error) and "memory" not in str(error):
            raise
        num_weights = sum(parameter.numel() for parameter in model.parameters())
        reason = str(error).splitlines()[0]
        raise ConfigError(f"the model's {num_weights:,} weights can't be made ({reason}); make it smaller") from None
