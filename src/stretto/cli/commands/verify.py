"""The command `stretto verify`.

Check that the run's layout gives the same results as one rank: run a few training steps both ways, and compare them
block by block. Exit code 0: equal. 1: not equal.

example:
  stretto verify run.toml --layout.stages 2 --layout.chunks 8
"""

import argparse
from typing import TYPE_CHECKING

from stretto.base.errors import ConfigError, StrettoError
from stretto.cli.config_options import add_config_options, load_run_config
from stretto.cli.parser import Parser
from stretto.config.run import RunConfig

if TYPE_CHECKING:
    from stretto.mesh.world import World


class LayoutMismatchError(StrettoError):
    """The layout does not give the same results as one rank."""

    exit_code = 1


def add_arguments(parser: Parser) -> None:
    parser.usage = "stretto verify RUN.toml [--steps N] [--double] [--section.field VALUE ...]"
    add = parser.add_argument
    # Not `steps`: Parser.add_dashes would turn the `steps=` in an error about train.steps into `--steps=`.
    add("--steps", dest="num_steps", type=int, default=3, metavar="N", help="number of steps to compare (default: 3)")
    add("--double", action="store_true", help="compare in float64, with a smaller tolerance")
    add_config_options(parser)


def run(options: argparse.Namespace) -> None:
    """Compare, and print the differences."""
    config = load_run_config(options)
    if options.num_steps < 1:
        raise ConfigError(f"--steps={options.num_steps} compares nothing; use at least 1")
    from stretto.cli.run_on_ranks import RankCommand, run_on_ranks

    # The default `check` of RankCommand is enough: verify writes nothing, so the folder may already hold a run.
    run_on_ranks(config, RankCommand(options.command_line, lambda world, config: _verify(world, config, options)))


def _verify(world: "World", config: RunConfig, options: argparse.Namespace) -> None:
    from stretto.cli.views.console import make_console
    from stretto.cli.views.result_views import verification_table
    from stretto.measure.verify import verify
    from stretto.train.build import build_inputs

    inputs = build_inputs(config)
    verification = verify(
        inputs.model.double() if options.double else inputs.model,
        inputs.loss,
        inputs.train.windows,
        config.layout,
        world,
        seed=config.run.seed,
        num_steps=options.num_steps,
        precision=config.run.precision,
    )
    console = make_console(is_quiet=not world.is_rank_zero, is_wrapped=True)
    console.print(verification_table(verification))
    if verification.is_equal:
        console.print(f"{config.layout}: {verification.verdict}", soft_wrap=True)
    else:
        is_rounding_possible = not options.double and not verification.violations
        hint = "; check with --double whether that is only rounding" if is_rounding_possible else ""
        # Only rank 0 prints the verdict; the others exit with the same code.
        raise LayoutMismatchError(f"{verification.verdict}{hint}" if world.is_rank_zero else "")
