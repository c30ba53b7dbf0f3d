"""Checks a run before it starts: its inputs, its folder, and the checkpoint that it resumes from."""

from collections.abc import Sequence

from stretto.base.errors import ConfigError, DataError, StrettoError
from stretto.base.redact import redact
from stretto.base.run_folder import RunFolder
from stretto.checkpoint.checkpoint import Checkpoint, find_resume_point
from stretto.checkpoint.storage import open_storage
from stretto.config.run import RunConfig
from stretto.config.toml import load_config
from stretto.mesh.world import World
from stretto.train.build import RunInputs, build_inputs
from stretto.train.config_changes import find_changes, reject_changes
from stretto.train.sinks.sinks import check_node_sinks, check_sinks
from stretto.train.trained_model import check_weights
from stretto.train.weights import check_initial_weights


def prepare_run(
    config: RunConfig,
    resume: str = "auto",
    allowed_locations: Sequence[str] = (),
    *,
    is_first_rank: bool = True,
    ranks_per_node: int | None = None,
) -> RunInputs:
    """Return a run's inputs; raise if it can't start or resume. The other arguments are those of `Run`.

    Only the first rank looks at the run's folder, its checkpoints and the sizes of the data's files: with thousands of
    ranks and files, storage would get millions of requests. If it raises, the other ranks end with the same error.
    """
    if not is_first_rank:
        check_node_sinks(config.logging)
        return build_inputs(config, checks_files=False, ranks_per_node=ranks_per_node)
    _check_folder(config, resume)
    check_sinks(config.logging)
    inputs = build_inputs(config, ranks_per_node=ranks_per_node)
    checkpoint = _find_checkpoint(config, resume, allowed_locations)
    if checkpoint is not None:
        _check_checkpoint(checkpoint, config, inputs)
    elif config.model.weights is not None:
        check_initial_weights(inputs.model, config.model.weights)
    return inputs


def check_same_data(inputs: RunInputs, config: RunConfig, world: World) -> None:
    """Raise the same error on every rank if ranks have different data, as from a function with a random seed."""
    feeds = [feed for feed in (inputs.train, inputs.valid) if feed is not None]
    digests = " ".join(f"{feed.data_spec.task} {feed.digest}" for feed in feeds)
    (num_different,) = world.all_reduce([float(world.broadcast_text(digests) != digests)])
    if num_different:
        raise DataError(
            f"data from {config.data.source} differs on {int(num_different)} of {world.size} ranks from that of rank "
            "0; use the same data on every rank"
        )


def checkpoint_location(config: RunConfig) -> str:
    """Return the folder or URL of a run's checkpoints."""
    return config.save.to or str(RunFolder(config.run.folder).checkpoints)


def newest_checkpoint_name(config: RunConfig) -> str | None:
    """Return the name of the checkpoint that a run would resume from; None if there is none, or it can't be read."""
    checkpoint = _newest_checkpoint(config)
    return None if checkpoint is None else checkpoint.name


def newest_checkpoint_step(config: RunConfig) -> int | None:
    """Return the step of the checkpoint that a run would resume from; None if there is none, or it can't be read."""
    checkpoint = _newest_checkpoint(config)
    return None if checkpoint is None else checkpoint.manifest.training_state.step


def _newest_checkpoint(config: RunConfig) -> Checkpoint | None:
    try:
        return _find_checkpoint(config, "auto")
    except (StrettoError, OSError):
        return None


def _find_checkpoint(config: RunConfig, resume: str, allowed_locations: Sequence[str] = ()) -> Checkpoint | None:
    storage = open_storage(checkpoint_location(config), config.data.retry_seconds)
    return find_resume_point(storage, resume, config.data.retry_seconds, allowed_locations).checkpoint


def _check_folder(config: RunConfig, resume: str) -> None:
    """Raise if the folder holds a run and `resume` is `never`, or if that run has a different `save.to`."""
    folder = RunFolder(config.run.folder)
    if not folder.config.is_file():
        return
    if resume == "never":
        raise ConfigError(f"run.folder={folder} already holds a run; choose a different run.folder, or delete it")
    old, new = (redact(location) for location in (load_config(folder.config).save.to, config.save.to))
    if old != new:
        # Otherwise the run would not find its checkpoints, and silently start from the beginning.
        remedy = "leave save.to out" if old is None else f"set save.to={old}"
        raise ConfigError(
            f"run.folder={folder} holds a run with its checkpoints in {old or 'its own folder'}, not in "
            f"{new or 'its own folder'}; {remedy}, or choose a different run.folder"
        )


def _check_checkpoint(checkpoint: Checkpoint, config: RunConfig, inputs: RunInputs) -> None:
    """Raise if a checkpoint does not fit this run's config, data or model."""
    run_info = checkpoint.manifest.run_info
    reject_changes(find_changes(run_info.config, config), checkpoint.location)
    if run_info.data not in (None, inputs.train.digest):
        raise ConfigError(
            f"data from {config.data.source} is not the data that {checkpoint.location} was saved with, so the "
            "saved position means nothing; use the same data, or choose a different run.folder"
        )
    check_weights(inputs.model, checkpoint)
