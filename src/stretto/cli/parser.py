"""Parser: argparse that answers a mistake like the rest of the house, with one sentence."""

import argparse
import difflib
import textwrap
from pathlib import Path
from typing import NoReturn

from stretto.base.errors import ConfigError

# What argparse takes where it wraps, at most: the text has to be read in a narrow terminal too.
_WIDTH = 78


class Parser(argparse.ArgumentParser):
    """Raises our error where argparse would print its usage and exit."""

    def __init__(self, prog: str, description: str, epilog: str, usage: str | None = None) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=textwrap.fill(description, _WIDTH),
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse_all(self, arguments: list[str]) -> argparse.Namespace:
        """Parse arguments; an option that does not exist is answered with the one most like it."""
        options, unknown = self.parse_known_args(arguments)
        if unknown:
            name = unknown[0].split("=")[0]
            known = [option for option in self._option_string_actions if option not in ("-h", "--help")]
            near = [option for option in known if option.endswith("." + name.lstrip("-"))]
            near = near or difflib.get_close_matches(name, known, n=1)
            inner = [option for option in known if option.startswith(f"{name}.")]
            hint = f"did you mean {near[0]}?" if near else f"see `{self.prog} --help`"
            if inner:
                hint = f"it is a section: {', '.join(inner)}"
            raise ConfigError(f"{name} is not an option of `{self.prog}`; {hint}")
        return options

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def refuse_existing(option: str, path: Path) -> None:
    """Refuse a file to write that is there already: what was made before is never lost to a slip of the hand."""
    try:
        is_there = path.exists()
    except OSError:
        return  # a name that can't be; whoever writes it says so
    if is_there:
        raise ConfigError(f"{option}={path} exists already; give another, or delete it")


def add_model_arguments(parser: Parser) -> None:
    """Let a command take the model of a run."""
    parser.add_argument("run", metavar="RUN", help="the run's folder, or a checkpoint")
    parser.add_argument("--device", metavar="NAME", help="where to compute; the run's own run.device if not given")
    parser.add_argument(
        "--trust", action="store_true", help="run the code that the run's model.factory or model.loss names"
    )
