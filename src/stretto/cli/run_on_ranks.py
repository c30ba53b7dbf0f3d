"""run_on_ranks: launch the ranks that a command needs, unless this process is already one of them."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from stretto.base.errors import LostPeerError, MeshError
from stretto.base.units import pluralize
from stretto.cli.automatic_layout import choose_layout_locally, choose_layout_on_ranks, layout_arguments
from stretto.cli.rank_exit import exit_on_error
from stretto.cli.views.console import make_console
from stretto.config.layout import Layout
from stretto.config.run import RunConfig
from stretto.launch.parent_exit import exit_when_launcher_dies
from stretto.mesh.join import world
from stretto.mesh.launch_info import find_launch_info
from stretto.mesh.node_info import NodeInfo, find_node_info
from stretto.mesh.world import World
from stretto.train.build import build_inputs, fit_to_ranks
from stretto.train.start import newest_checkpoint_name, newest_checkpoint_step

_DEFAULT_RESTARTS = 3


@dataclass(frozen=True)
class RankCommand:
    """A command that does its work on every rank of a layout."""

    arguments: list[str]  # the command line that each rank is launched with
    function: Callable[[World, RunConfig], None]  # what each rank runs
    check: Callable[[RunConfig], object] = build_inputs  # raises user errors once, before ranks are launched
    max_restarts: int | None = 0  # in a row without progress; None: 0 for one rank, else _DEFAULT_RESTARTS
    progress: Callable[[], object] | None = None  # a new value means progress; by default the newest checkpoint
    secret_folder: Path | None = None  # for the ranks' secret, see `world`
    saves_plan: bool = False  # write the plan of an automatic layout to the run's folder
    resumes: bool = False  # the same command resumes from the run's newest checkpoint


def run_on_ranks(config: RunConfig, command: RankCommand) -> None:
    """Run a command on as many ranks as the layout needs; if `layout.auto` is set, choose the layout first."""
    if (launch_info := find_launch_info(os.environ)) is not None:
        _run_as_rank(fit_to_ranks(config, launch_info.size), command)
        return
    if (node := find_node_info(os.environ)) is not None:
        _launch_node(config, command, node)
        return
    if config.layout.auto:
        # Report errors before minutes are spent on measuring.
        command.check(config.model_copy(update={"layout": Layout()}))
        config = choose_layout_locally(config, saves_plan=command.saves_plan)
        command = replace(command, arguments=[*command.arguments, *layout_arguments(config.layout)])
    # A single rank is launched as a child process only if it may have to be restarted.
    if config.layout.num_ranks > 1 or command.max_restarts:
        _launch(config, command)
    else:
        _run_as_rank(config, command)


def _launch(config: RunConfig, command: RankCommand) -> None:
    """Launch the ranks on this machine and wait for them."""
    from stretto.launch.local import launch_local

    command.check(config)
    try:
        launch_local(
            config.layout.num_ranks,
            command.arguments,
            max_restarts=_DEFAULT_RESTARTS if command.max_restarts is None else command.max_restarts,
            grace_seconds=config.run.grace_seconds,
            progress=command.progress or (lambda: newest_checkpoint_name(config)),
            on_message=lambda message: print(f"stretto: {message}", file=sys.stderr, flush=True),
        )
    except LostPeerError as error:
        step = newest_checkpoint_step(config) if command.resumes else None
        hint = "" if step is None else f"; step {step:,} is saved, and the same command resumes from it"
        raise LostPeerError(f"{error}{hint}") from None
    finally:
        # A rank that was killed during its live view leaves the cursor hidden.
        make_console().show_cursor()


def _launch_node(config: RunConfig, command: RankCommand, node: NodeInfo) -> None:
    """Launch the ranks of this node, one of several, and wait for them. After a failure, all nodes must be restarted.

    As under other launchers of several nodes, the ranks check the config, and one of them reports an error.
    """
    from stretto.launch.local import launch_local
    from stretto.launch.node_rendezvous import NodeRendezvous

    layout = config.layout
    if layout.num_ranks != node.num_ranks and not layout.auto and not layout.elastic:
        raise MeshError(
            f"the layout needs {pluralize(layout.num_ranks, 'rank')}, but {node.num_nodes} nodes with "
            f"{node.ranks_per_node} ranks each have {node.num_ranks}; change the layout, or set layout.elastic"
        )
    nodes = NodeRendezvous(node, timedelta(seconds=config.run.timeout))
    launch_local(node.ranks_per_node, command.arguments, grace_seconds=config.run.grace_seconds, nodes=nodes)


def _run_as_rank(config: RunConfig, command: RankCommand) -> None:
    """Join the other ranks and do the work of this one."""
    exit_when_launcher_dies()
    num_ranks = None if config.layout.auto else config.layout.num_ranks
    timeout = timedelta(seconds=config.run.timeout)
    with (
        world(num_ranks, device=config.run.device, timeout=timeout, secret_folder=command.secret_folder) as joined,
        exit_on_error(joined),
    ):
        if config.layout.auto:
            config = choose_layout_on_ranks(config, joined, saves_plan=command.saves_plan)
        command.function(joined, config)
