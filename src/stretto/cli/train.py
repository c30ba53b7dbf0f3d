"""`stretto train`: a run from its TOML file, with any field overridden."""

from pathlib import Path

from stretto.cli.options import add_config_options, config_overrides
from stretto.cli.parser import Parser
from stretto.config.toml import load_config


def run(arguments: list[str]) -> None:
    """Parse, check and train."""
    options = _parser().parse_all(arguments)
    config = load_config(options.config, config_overrides(options))
    # Only now is torch needed: help and a bad config answer at once.
    from stretto.cli.ranks import on_ranks
    from stretto.cli.screen import show_run
    from stretto.train.run import Run, prepare_run

    on_ranks(config, ["train", *arguments], lambda world: show_run(Run(config, world)), prepare_run)


def _parser() -> Parser:
    parser = Parser(
        prog="stretto train",
        usage="stretto train RUN.toml [--section.field VALUE ...]",
        description="Train a model from a run's TOML file; every field can be overridden by an option.",
        epilog="example:\n  stretto train run.toml --train.lr 3e-4 --run.folder runs/second",
    )
    parser.add_argument("config", type=Path, metavar="RUN.toml", help="the run's TOML file")
    add_config_options(parser)
    return parser
