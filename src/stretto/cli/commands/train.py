"""`stretto train`: a run from its TOML file, with any field overridden."""

import os
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.base.remote import is_remote
from stretto.cli.config_options import add_config_options, config_overrides
from stretto.cli.parser import Parser
from stretto.config.toml import load_config


def run(arguments: list[str]) -> None:
    """Parse, check and train."""
    options = make_parser().parse_all(arguments)
    config = load_config(options.config, config_overrides(options))
    # Only now is torch needed: help and a bad config answer at once.
    from stretto.cli.run_on_ranks import run_on_ranks
    from stretto.cli.views.training_view import show_run
    from stretto.train.run import Run, prepare_run

    resume = options.resume
    if resume not in ("auto", "never") and not is_remote(resume) and not Path(resume).exists():
        raise ConfigError(f"--resume={resume} is not auto, never, or a path that is there; give one of these")
    if resume == "never" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        # Asked of the run, not of ranks that are started again in the middle of it.
        resume = "auto"
    run_on_ranks(
        config,
        ["train", *arguments],
        lambda world, fitted: show_run(Run(fitted, world, resume)),
        lambda config: prepare_run(config, resume),
        restarts=config.run.restarts,
        saves_plan=True,
    )


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(
        prog="stretto train",
        usage="stretto train RUN.toml [--resume auto|never|PATH] [--section.field VALUE ...]",
        description="Train a model from a run's TOML file; every field can be overridden by an option. A run that is "
        "already in the folder goes on.",
        epilog="example:\n  stretto train run.toml --train.lr 3e-4 --run.folder runs/second\n\n"
        "exit codes:\n  0 done, 2 your mistake, 75 not finished: start it again and it goes on,\n"
        "  76 replaced by a newer start of the same run, 130 interrupted",
    )
    parser.add_argument("config", type=Path, metavar="RUN.toml", help="the run's TOML file")
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="go on from the newest checkpoint in the run's folder, if there is one (auto), start only in a folder "
        "without a run (never), or go on from the checkpoint at a path or URL (default: auto)",
    )
    add_config_options(parser)
    return parser
