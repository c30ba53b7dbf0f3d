"""`stretto profile`: measure a run's model on this machine, or work out what it would cost on another."""

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
    options = make_parser().parse_all(arguments)
    config = load_config(options.config, config_overrides(options))
    for name in ("ranks", "threads"):
        if (getattr(options, name) or 0) < 0:
            raise ConfigError(f"--{name}={getattr(options, name)} should be 0 or more; leave it out")
    from stretto.cli.run_on_ranks import run_on_ranks
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
        make_console().print(f"profile of {options.hardware}, simulated, is in {path}")
    elif (launch_info := find_launch_info(os.environ)) is None:
        # One rank is measured among others, so that links and shared cores are known too.
        launch_profile(alone, path, options.ranks or num_ranks_to_measure(profile_input.device), profile_input.threads)
    else:
        run_on_ranks(
            config.model_copy(update={"layout": Layout(replicas=launch_info.size)}),
            ["profile", *arguments],
            lambda world, _: _measure(profile_input, world, path),
        )


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
        console.print(f"profile of {profile.device} is in {path}")


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(
        prog="stretto profile",
        usage="stretto profile RUN.toml [--out FILE] [--ranks N] [--hardware A100|H100] [--section.field VALUE ...]",
        description="Measure what each block of a run's model costs on this machine's devices, and the links between\n"
        "them, for `stretto plan`. With --hardware nothing is measured: the profile is worked out from a data sheet.",
        epilog="example:\n  stretto profile run.toml --out here.json\n"
        "  stretto profile run.toml --hardware H100 --out h100.json\n"
        "  torchrun --nnodes 2 --nproc-per-node 8 ... -m stretto profile run.toml --out cluster.json",
    )
    parser.add_argument("config", type=Path, metavar="RUN.toml", help="the run's TOML file")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write it (default: in data.cache)")
    parser.add_argument("--ranks", type=int, default=0, metavar="N", help="how many ranks to measure (default: all)")
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of a rank on a CPU; 0 is a share of the cores (default: OMP_NUM_THREADS, or 0)",
    )
    parser.add_argument("--hardware", dest="hardware", metavar="NAME", help="a device that is not here: A100 or H100")
    add_config_options(parser)
    return parser
