"""`stretto profile`: measure the model of a run on this machine, or estimate its cost on other hardware."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.base.errors import ConfigError
from stretto.cli.config_options import add_config_options, config_overrides
from stretto.cli.parser import Parser
from stretto.config.layout import Layout
from stretto.config.toml import load_config

if TYPE_CHECKING:
    from stretto.measure.profile_input import ProfileInput
    from stretto.mesh.world import World


def run(arguments: list[str]) -> None:
    """Parse, measure, and write the profile."""
    with make_parser().parsed(arguments) as options:
        _profile(options, arguments)


def _profile(options: argparse.Namespace, arguments: list[str]) -> None:
    config = load_config(options.config, config_overrides(options))
    for name in ("ranks", "threads"):
        if (getattr(options, name) or 0) < 0:
            raise ConfigError(f"--{name}={getattr(options, name)} must be at least 0")
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

    alone = config.model_copy(update={"layout": Layout()})
    profile_input = profile_input_from_config(config, options.threads)
    path = options.out or profile_path(config.data.cache, profile_input)
    if options.hardware is not None:
        save_profile(derive_from_data_sheet(options.hardware, profile_input), path)
        make_console().print(f"the profile of {options.hardware}, from its data sheet, is in {path}")
    elif (launch_info := find_launch_info(os.environ)) is None:
        # Several ranks are measured together, so that links and shared cores are part of the profile.
        launch_profile(alone, path, options.ranks or num_ranks_to_measure(profile_input.device), profile_input.threads)
    else:
        config = config.model_copy(update={"layout": Layout(replicas=launch_info.size)})
        command = RankCommand(["profile", *arguments], lambda world, _: _measure(profile_input, world, path))
        run_on_ranks(config, command)


def _measure(profile_input: "ProfileInput", world: "World", path: Path) -> None:
    from stretto.cli.views.console import make_console
    from stretto.cli.views.progress import show_progress
    from stretto.measure.profile import measure_on_ranks
    from stretto.plan.profile import save_profile

    console = make_console(is_quiet=not world.is_rank_zero)
    with show_progress(console) as progress:
        profile = measure_on_ranks(profile_input, world, progress)
    if world.is_rank_zero:
        save_profile(profile, path)
        console.print(f"the profile of {profile.device} is in {path}")


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(
        prog="stretto profile",
        usage="stretto profile RUN.toml [--out FILE] [--ranks N] [--hardware A100|H100] [--section.field VALUE ...]",
        description="Measure the time and memory of each block of a run's model on this machine, and the links between "
        "its devices, for `stretto plan`. With --hardware, nothing is measured: the profile is estimated from a data "
        "sheet.",
        epilog="example:\n  stretto profile run.toml --out here.json\n"
        "  stretto profile run.toml --hardware H100 --out h100.json\n"
        "  torchrun --nnodes 2 --nproc-per-node 8 ... -m stretto profile run.toml --out cluster.json",
    )
    parser.add_argument("config", type=Path, metavar="RUN.toml", help="TOML file of the run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: in data.cache)")
    parser.add_argument(
        "--ranks", type=int, default=0, metavar="N", help="number of ranks to measure (default: all devices)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads per rank on a CPU; 0 divides the cores among the ranks (default: OMP_NUM_THREADS, or 0)",
    )
    parser.add_argument("--hardware", metavar="NAME", help="estimate a profile of a different device: A100 or H100")
    add_config_options(parser)
    return parser
