"""The command `stretto profile`.

Measure the time and memory of each block of a run's model on this machine, and the links between its devices, for
`stretto plan`. With --hardware, nothing is measured: the profile is estimated from a data sheet.

example:
  stretto profile run.toml --out here.json
  stretto profile run.toml --hardware H100 --out h100.json
  torchrun --nnodes 2 --nproc-per-node 8 ... --no-python stretto profile run.toml --out cluster.json
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.base.errors import ConfigError
from stretto.cli.config_options import add_config_options, load_run_config
from stretto.cli.parser import Parser
from stretto.config.layout import Layout
from stretto.config.run import RunConfig
from stretto.plan.hardware import find_hardware

if TYPE_CHECKING:
    from stretto.mesh.world import World


def add_arguments(parser: Parser) -> None:
    parser.usage = (
        "stretto profile RUN.toml [--out FILE] [--ranks N] [--threads N] [--hardware NAME] [--section.field VALUE ...]"
    )
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE", help="file to write (default: in data.cache)")
    add("--ranks", type=int, metavar="N", help="number of ranks (default: one per GPU; on a CPU 2 per core, up to 4)")
    add("--threads", type=int, metavar="N", help="threads per rank; 0: split the cores (default: OMP_NUM_THREADS or 0)")
    add("--hardware", metavar="NAME", help="estimate the profile of a different device: A100 or H100")
    # Internal: layouts that ranks try, and the steps of a turn, see `_try_finalists`.
    add("--finalists", type=Path, help=argparse.SUPPRESS)
    add("--turn-steps", type=int, help=argparse.SUPPRESS)
    add_config_options(parser)


def run(options: argparse.Namespace) -> None:
    """Measure or estimate, and write the profile."""
    config = load_run_config(options)
    for name, value, minimum in (("ranks", options.ranks, 1), ("threads", options.threads, 0)):
        if value is not None and value < minimum:
            raise ConfigError(f"--{name}={value} must be at least {minimum}")
    if options.hardware is not None:
        find_hardware(options.hardware)  # report an unknown name before torch is imported
    from stretto.cli.run_on_ranks import RankCommand, run_on_ranks
    from stretto.cli.views.console import make_console
    from stretto.mesh.launch_info import find_launch_info
    from stretto.plan.profile import save_profile
    from stretto.planning.profiles import (
        derive_from_data_sheet,
        launch_profile,
        num_ranks_to_measure,
        profile_input_from_config,
        profile_path,
    )

    if options.hardware is None and (launch_info := find_launch_info(os.environ)) is not None:
        config = config.model_copy(update={"layout": Layout(replicas=launch_info.size)})
        work = _measure if options.finalists is None else _try_finalists
        run_on_ranks(config, RankCommand(options.command_line, lambda world, config: work(world, config, options)))
        return
    profile_input = profile_input_from_config(config, options.threads)
    path = options.out or profile_path(config.data.cache, profile_input)
    if options.hardware is not None:
        save_profile(derive_from_data_sheet(options.hardware, profile_input), path)
        make_console().print(f"the profile of {options.hardware}, from its data sheet, is in {path}")
    else:
        # Launch ranks that run this command again (see `_measure`): several, to measure links and how they share cores.
        num_ranks = options.ranks or num_ranks_to_measure(profile_input.device)
        launch_profile(config.model_copy(update={"layout": Layout()}), path, num_ranks, profile_input.threads)


def _measure(world: "World", config: RunConfig, options: argparse.Namespace) -> None:
    """Measure on this rank and its device."""
    from stretto.cli.views.console import make_console
    from stretto.cli.views.progress import show_measurements
    from stretto.measure.profile import measure_on_ranks
    from stretto.plan.profile import save_profile
    from stretto.planning.profiles import profile_input_from_config, profile_path

    profile_input = profile_input_from_config(config, options.threads, world.device)
    path = options.out or profile_path(config.data.cache, profile_input)
    console = make_console(is_quiet=not world.is_rank_zero)
    with show_measurements(console) as progress:
        profile = measure_on_ranks(profile_input, world, progress)
    if world.is_rank_zero:
        save_profile(profile, path)
        console.print(f"the profile of {profile.device} is in {path}")


def _try_finalists(world: "World", config: RunConfig, options: argparse.Namespace) -> None:
    """Serve `try_on_this_machine`: try the layouts in the file `--finalists`; rank 0 writes the trials to `--out`."""
    from stretto.cli.views.console import make_console
    from stretto.cli.views.progress import show_measurements
    from stretto.plan.trial import parse_finalists, save_trials
    from stretto.planning.profiles import profile_input_from_config
    from stretto.planning.trial_runs import try_layouts

    profile_input = profile_input_from_config(config, options.threads, world.device)
    finalists = parse_finalists(options.finalists.read_text(encoding="utf-8"))
    with show_measurements(make_console(is_quiet=not world.is_rank_zero), "plan") as progress:
        trials = try_layouts(profile_input, world, finalists, progress, options.turn_steps)
    if world.is_rank_zero:
        save_trials(trials, options.out)
