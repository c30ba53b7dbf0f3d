"""The trials of a plan's finalists: read from the cache, or measured on ranks that run already or are launched for it.

The cache has them in `trials/`, by a fingerprint of the profile and the finalists, so a new profile means new trials.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from stretto.base.errors import LostPeerError
from stretto.base.fingerprint import fingerprint
from stretto.config.layout import Layout
from stretto.config.run import RunConfig
from stretto.config.toml import dump_config
from stretto.launch.local import RanksEndedError, launch_local
from stretto.measure.profile import Progress
from stretto.measure.profile_input import ProfileInput
from stretto.mesh.world import World
from stretto.plan.cluster import Cluster
from stretto.plan.memory import num_communicators
from stretto.plan.profile import Profile
from stretto.plan.trial import Finalist, Trial, dump_finalists, dump_trials, load_trials, parse_trials, save_trials
from stretto.planning.trial_runs import num_turn_steps, try_layouts

_log = logging.getLogger(__name__)

_FORMAT = 2  # of what is cached; 2 has `Trial.at_least`
_FAILED = "the ranks that tried it failed"  # a trial's note


def trials_path(cache: Path, profile: Profile, cluster: Cluster, finalists: Sequence[Finalist]) -> Path:
    """Return the path in the folder `cache` at which these trials are, or would be, cached."""
    layouts = [finalist.layout.model_dump(mode="json") for finalist in finalists]
    key = fingerprint([_FORMAT, profile.model_dump(mode="json"), cluster.devices, cluster.nodes, layouts])[:16]
    return cache.expanduser() / "trials" / f"{key}.json"


def try_on_ranks(
    profile_input: ProfileInput, world: World, finalists: Sequence[Finalist], path: Path, progress: Progress
) -> tuple[Trial, ...]:
    """Return the trials in the file `path`. If it does not exist, try the finalists on all ranks of `world` first.

    Every rank must call this; all get the same trials.
    """
    cached = load_trials(path) if world.is_rank_zero else None
    # Only rank 0 reads the cache; the sum tells the other ranks whether trials were found.
    if world.all_reduce([float(cached is not None)])[0]:
        return parse_trials(world.broadcast_text("" if cached is None else dump_trials(cached)))
    trials = try_layouts(profile_input, world, finalists, progress)
    if world.is_rank_zero:
        _save_if_complete(trials, path)
    return trials


def try_on_this_machine(
    config: RunConfig, finalists: Sequence[Finalist], path: Path, threads: int
) -> tuple[Trial, ...]:
    """Return the trials in the file `path`. If it does not exist, launch ranks that try the finalists first."""
    trials = load_trials(path)
    if trials is None:
        turn_steps = num_turn_steps(finalists)
        trials = _launch_trials(config, finalists, threads, turn_steps)
        if trials is None:
            _log.warning("the ranks that tried layouts have failed, so each layout is tried on ranks of its own")
            alone = [_launch_trials(config, [each], threads, turn_steps) or (_failed(each),) for each in finalists]
            trials = tuple(trial for (trial,) in alone)
        _save_if_complete(trials, path)
    return trials


def leaves_room(profile: Profile, finalists: Sequence[Finalist]) -> bool:
    """Return whether a run fits in memory after trials on its own ranks: their communicators stay until these end."""
    counts = [
        max(num_communicators(layout, column) for column in range(layout.stages * layout.spans))
        for layout in (finalist.layout for finalist in finalists)
    ]
    kept = sum(counts) * profile.communicator_bytes
    return kept + max(finalist.memory for finalist in finalists) <= profile.memory


def _save_if_complete(trials: Sequence[Trial], path: Path) -> None:
    """Cache trials, unless one has failed: that may be due to another job on the same device."""
    if all(trial.measured is not None for trial in trials):
        save_trials(trials, path)


def _launch_trials(
    config: RunConfig, finalists: Sequence[Finalist], threads: int, turn_steps: int
) -> tuple[Trial, ...] | None:
    """Launch ranks on this machine that try the finalists; None if a rank failed, for example for lack of memory."""
    config = config.model_copy(update={"layout": Layout()})
    num_ranks = max(finalist.layout.num_ranks for finalist in finalists)
    with TemporaryDirectory(prefix="stretto-") as folder:
        config_path, finalists_path, out = (Path(folder) / name for name in ("run.toml", "finalists.json", "out.json"))
        config_path.write_text(dump_config(config), encoding="utf-8")
        finalists_path.write_text(dump_finalists(finalists), encoding="utf-8")
        options = ["--finalists", str(finalists_path), "--out", str(out)]
        options += ["--threads", str(threads), "--turn-steps", str(turn_steps)]
        try:
            launch_local(num_ranks, ["profile", str(config_path), *options])
        except RanksEndedError as error:
            if error.exit_code == LostPeerError.exit_code or error.exit_code >= 128:  # stopped by a signal
                raise
        except LostPeerError as error:
            _log.warning("a trial of layouts failed: %s", error)
        return load_trials(out)


def _failed(finalist: Finalist) -> Trial:
    return Trial(layout=finalist.layout, predicted=finalist.predicted, measured=None, note=_FAILED)
