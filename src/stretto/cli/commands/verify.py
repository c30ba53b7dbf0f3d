"""`stretto verify`: does the layout compute what one rank computes, with the user's own model and data?"""

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
    """The layout does not compute what one rank computes."""

    exit_code = 1


def run(arguments: list[str]) -> None:
    """Parse, compare, and say what was found."""
    options = make_parser().parse_all(arguments)
    config = load_config(options.config, config_overrides(options))
    if options.steps < 1:
        raise ConfigError(f"--steps={options.steps} compares nothing; use at least 1")
    from stretto.cli.run_on_ranks import run_on_ranks

    # The run's folder is not written, so one that holds a run is no trouble.
    run_on_ranks(
        config, ["verify", *arguments], lambda world, fitted: _verify(fitted, world, options.steps, options.double)
    )


def _verify(config: RunConfig, world: "World", num_steps: int, is_double: bool) -> None:
    from stretto.cli.views.console import make_console
    from stretto.cli.views.result_views import verification_table
    from stretto.measure.verify import verify
    from stretto.train.build import build_loss, validate_config

    model, feed, _ = validate_config(config)
    found = verify(
        model.double() if is_double else model,
        build_loss(config, feed.data_spec.task),
        feed.windows,
        config.layout,
        world,
        seed=config.run.seed,
        num_steps=num_steps,
        precision=config.run.precision,
    )
    console = make_console(is_quiet=not world.is_rank_zero, is_wrapped=True)
    console.print(verification_table(found))
    if found.is_equal:
        console.print(f"{config.layout}: {found.verdict}", soft_wrap=True)
    else:
        # One rank says it; the others end with the same code and no word.
        raise LayoutMismatchError(found.verdict if world.is_rank_zero else "")


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(
        prog="stretto verify",
        usage="stretto verify RUN.toml [--steps N] [--double] [--section.field VALUE ...]",
        description="Take a few steps of a run on one rank and in its layout, and compare them block by block.\n"
        "Exit code 0: equal. 1: not equal.",
        epilog="example:\n  stretto verify run.toml --layout.stages 2 --layout.chunks 8",
    )
    parser.add_argument("config", type=Path, metavar="RUN.toml", help="the run's TOML file")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="how many steps to compare (default: 3)")
    parser.add_argument("--double", action="store_true", help="in float64, for the sharpest answer")
    add_config_options(parser)
    return parser
