"""The command `stretto train`.

Train the run that a TOML file describes; options override its fields. If the run has a checkpoint, training resumes.

example:
  stretto train run.toml --train.lr 3e-4 --run.folder runs/second

exit codes:
  0 done, 2 an error to fix, 75 not finished: launch it again to resume,
  76 replaced by a newer launch of the same run, 130 interrupted
"""

import argparse
import os
import sys
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.base.remote import is_remote
from stretto.base.run_folder import split_best
from stretto.cli.config_options import add_config_options, load_run_config
from stretto.cli.parser import Parser, add_location_argument
from stretto.config.effects import used_effects
from stretto.config.run import RunConfig
from stretto.mesh.launch_info import find_launch_info
from stretto.mesh.launcher_watch import LAUNCHER_PID_VARIABLE
from stretto.mesh.node_info import find_node_info


def add_arguments(parser: Parser) -> None:
    parser.usage = (
        "stretto train RUN.toml [--resume auto|never|PATH] [--allow-location URL] [--section.field VALUE ...]"
    )
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="auto: resume from the run's newest checkpoint, if there is one; never: refuse a folder "
        "that holds a run; PATH: resume from the checkpoint, run or RUN@best at this path or URL (default: auto)",
    )
    add_location_argument(parser)
    add_config_options(parser)


def run(options: argparse.Namespace) -> None:
    """Check the config, and train."""
    config = load_run_config(options)
    _show_effects(config, options.config)
    # torch is imported only now: help and config errors are printed without waiting for the import.
    from stretto.cli.run_on_ranks import RankCommand, run_on_ranks
    from stretto.cli.views.training_view import train_and_show
    from stretto.train.run import Run
    from stretto.train.start import prepare_run

    resume, allowed_locations = options.resume, options.allowed_locations
    if resume not in ("auto", "never") and not is_remote(resume) and not Path(split_best(resume)[0]).exists():
        raise ConfigError(f"--resume={resume} is not auto, never, a URL or an existing path; use one of these")
    if resume == "never" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        # `never` is for the first launch; ranks that the launcher restarts resume the run.
        resume = "auto"
    command = RankCommand(
        options.command_line,
        lambda world, config: train_and_show(Run(config, world, resume, allowed_locations=allowed_locations)),
        check=lambda config: prepare_run(config, resume, allowed_locations),
        max_restarts=config.run.max_restarts,
        # With `save.to`, nodes may each have a folder of their own.
        secret_folder=config.run.folder if config.save.to is None else None,
        saves_plan=True,
        resumes=True,
    )
    run_on_ranks(config, command)


def _show_effects(config: RunConfig, path: Path) -> None:
    """Say what a config that is not in the working folder runs and contacts: once, before anything of it is run."""
    node = find_node_info(os.environ)
    process = find_launch_info(os.environ) if node is None else node.launch_info
    is_first = LAUNCHER_PID_VARIABLE not in os.environ and (process is None or process.rank == 0)
    lines = [f"\n  {line}" for line in used_effects(config)]
    if is_first and lines and path.resolve().parent != Path.cwd():
        message = f"stretto: {path} is not in this folder, and its config does more than train:"
        print(message, *lines, sep="", file=sys.stderr, flush=True)
