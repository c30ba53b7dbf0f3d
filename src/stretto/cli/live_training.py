"""train_live: train a run that continues, in the same processes, when ranks are lost and others join."""

import sys
from collections.abc import Sequence

import torch

from stretto.base.errors import LostPeerError, StateLostError
from stretto.cli.rank_exit import exit_on_error
from stretto.cli.views.training_view import train_and_show
from stretto.config.run import RunConfig
from stretto.mesh.live_world import LiveWorld
from stretto.train.build import build_inputs
from stretto.train.events import RanksChangeError
from stretto.train.live_recovery import LiveRecovery
from stretto.train.run import Run
from stretto.train.signals import on_preemption_signal
from stretto.train.trainer import Request


def train_live(live: LiveWorld, config: RunConfig, resume: str, allowed_locations: Sequence[str] = ()) -> None:
    """Train to the end, in one round of ranks after another; each has a Run of its own."""
    _warm_up(config)
    recovery, is_planned = LiveRecovery(live, config.run.copy_every), False
    # A signal between two rounds counts in the next one.
    with on_preemption_signal(lambda: recovery.requests.add(Request.STOP)):
        while True:
            recovery.regroup(is_planned=is_planned)
            layout = config.layout.model_copy(update={"replicas": live.grid.num_replicas})
            end = _train(recovery, config.model_copy(update={"layout": layout}), resume, allowed_locations)
            if end is None:
                return
            is_planned = end is RanksChangeError
            if resume == "never":
                resume = "auto"  # of this launch; a path stays, so that all claims of the launch name it


def _train(
    recovery: LiveRecovery, config: RunConfig, resume: str, allowed_locations: Sequence[str]
) -> type[LostPeerError] | None:
    """Train with the present ranks; return None at the end of the run, or why the ranks change.

    What has connections to other ranks ends with this function.
    """
    world = recovery.live.world
    with exit_on_error(world):
        run = None
        try:
            run = Run(config, world, resume, allowed_locations=allowed_locations, recovery=recovery)
            train_and_show(run)
            return None
        except LostPeerError as error:
            if world.is_rank_zero and not isinstance(error, RanksChangeError):
                then = "" if isinstance(error, StateLostError) else "; the others continue"
                print(f"stretto: {error}{then}", file=sys.stderr, flush=True)
            if run is not None:
                run.close()
            if isinstance(error, RanksChangeError) and recovery.live.is_dismissed():
                slot = recovery.round.slots[world.rank]
                raise LostPeerError(f"rank {slot} slowed down all others, so it makes way for another") from None
            recovery.leave("" if isinstance(error, RanksChangeError) else str(error))
            if isinstance(error, StateLostError):
                recovery.forget()
            return type(error)


def _warm_up(config: RunConfig) -> None:
    """Do what takes seconds in a new process before the others wait for it: read the data's index, and import."""
    build_inputs(config, checks_files=False)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # imports torch's compiler
