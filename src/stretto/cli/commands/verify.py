"""`stretto verify`: check that a layout computes the same as one rank, with your own model and data."""

from pathlib import Path
from typing import TYPE_CHECKING

from stretto.base.errors import ConfigError, StrettoError
from stretto.cli.config_options import add_config_options, config_overrides
from stretto.cli.parser import Parser
from stretto.config.run import RunConfig
from stretto.config.toml import load_config

if TYPE_CHECKING:
    from stretto.mesh.world import World


class LayoutMismatchError(StrettoError):
    """The layout does not compute the same as one rank."""

    exit_code = 1


def run(arguments: list[str]) -> None:
    """Parse, compare, and print the differences."""
    options = make_parser().parse_all(arguments)
    config = load_config(options.config, config_overrides(options))
    if options.steps < 1:
        raise ConfigError(f"--steps={options.steps} compares nothing; use at least 1")
    from stretto.cli.run_on_ranks import RankCommand, run_on_ranks

    # Nothing is written to the run's folder, so it may hold a run.
    def verify_on_rank(world: "World", config: RunConfig) -> None:
        _verify(config, world, options.steps, options.double)

    run_on_ranks(config, RankCommand(["verify", *arguments], verify_on_rank))


def _verify(config: RunConfig, world: "World", num_steps: int, is_double: bool) -> None:
    from stretto.cli.views.console import make_console
    from stretto.cli.views.result_views import verification_table
    from stretto.measure.verify import verify
    from stretto.train.build import build_inputs

    inputs = build_inputs(config)
    verification = verify(
        inputs.model.double() if is_double else inputs.model,
        inputs.loss,
        inputs.train.windows,
        config.layout,
        world,
        seed=config.run.seed,
        num_steps=num_steps,
        precision=config.run.precision,
    )
    console = make_console(is_quiet=not world.is_rank_zero, is_wrapped=True)
    console.print(verification_table(verification))
    if verification.is_equal:
        console.print(f"{config.layout}: {verification.verdict}", soft_wrap=True)
    else:
        # One rank prints it; the others exit with the same code.
        raise LayoutMismatchError(verification.verdict if world.is_rank_zero else "")


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(
        prog="stretto verify",
        usage="stretto verify RUN.toml [--steps N] [--double] [--section.field VALUE ...]",
        description="Train a few steps of a run on one rank and in its layout, and compare them block by block. "
        "Exit code 0: equal. 1: not equal.",
        epilog="example:\n  stretto verify run.toml --layout.stages 2 --layout.chunks 8",
    )
    parser.add_argument("config", type=Path, metavar="RUN.toml", help="TOML file of the run")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="number of steps to compare (default: 3)")
    parser.add_argument("--double", action="store_true", help="compare in float64, with a smaller tolerance")
    add_config_options(parser)
    return parser
