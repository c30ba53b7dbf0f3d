"""Parser: argparse with one-sentence errors that name options as the user types them."""

import argparse
import difflib
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, NoReturn, TypeVar

from stretto.base.errors import ConfigError, StrettoError

if TYPE_CHECKING:
    from stretto.prepare.options import PrepareOptions

_WIDTH = 78  # fits a terminal of 80 columns
RUN_HELP = "folder of the run (its last weights), RUN@best (those of the best evaluation), or a checkpoint"
Options = TypeVar("Options", bound="PrepareOptions")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises `ConfigError` where argparse would print its usage and exit."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog,
            description=textwrap.fill(description, _WIDTH),
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse_all(self, arguments: list[str]) -> argparse.Namespace:
        """Parse arguments; for an unknown option, the error suggests a similar one."""
        options, unknown = self.parse_known_args(arguments)
        if unknown:
            name = unknown[0].split("=")[0]
            known = [option for option in self._option_string_actions if option not in ("-h", "--help")]
            similar = [option for option in known if option.endswith("." + name.lstrip("-"))]  # --train.lr for --lr
            # Without the dashes, which all options have: they would make `--as` similar to `--json`.
            by_word = {option.lstrip("-"): option for option in known}
            words = [] if similar else difflib.get_close_matches(name.lstrip("-"), by_word, n=1)
            similar += [by_word[word] for word in words]
            section_options = [option for option in known if option.startswith(f"{name}.")]
            hint = f"did you mean {similar[0]}?" if similar else f"see `{self.prog} --help`"
            if section_options:
                words = [*unknown[0].split("="), *arguments[arguments.index(unknown[0]) + 1 :], ""]
                field = self._option_string_actions.get(f"{name}.{words[1]}")
                hint = f"it is a section; choose from {', '.join(section_options)}"
                if field is not None:  # `--layout auto`
                    hint = f"write {field.option_strings[0]}{' true' if field.metavar == 'BOOL' else ''}"
            kind = "option" if name.startswith("-") else "argument"
            raise ConfigError(f"{name} is not an {kind} of `{self.prog}`; {hint}")
        return options

    def add_remainder(self) -> None:
        """Collect everything after the last positional argument as `arguments`, for the parser of a subcommand."""
        remainder = self.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        # Otherwise, an error about a missing positional argument would name this one too.
        remainder.required = False

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")

    def add_dashes(self, message: str) -> str:
        """Return a message from the library with command-line options in place of parameters.

        `max_symbols=3` becomes `--max-symbols=3`, and `has_label=False` the flag `--no-label`.
        """
        for action in self._actions:
            # Fields of a config, such as train.lr, are written as they are in the TOML file.
            if not action.option_strings or "." in action.dest:
                continue
            parameter, option = f"{action.dest}=", f"{action.option_strings[-1]}="
            if action.nargs == 0:  # a flag
                parameter, option = f"{action.dest}={action.const}", action.option_strings[-1]
            # Not within a word, a path or a dotted field: `a/label=3.csv` is a file.
            message = re.sub(rf"(?<![\w./-]){re.escape(parameter)}", option, message)
        return message

    @contextmanager
    def parsed(self, arguments: list[str]) -> Iterator[argparse.Namespace]:
        """Parse arguments; `add_dashes` is applied to errors that the library raises inside the context."""
        options = self.parse_all(arguments)
        try:
            yield options
        except StrettoError as error:
            error.args = (self.add_dashes(str(error)),)
            raise


def add_model_arguments(parser: Parser) -> None:
    """Add the arguments of commands that use the model of a run."""
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--device", metavar="NAME", help="device to compute on (default: the run's run.device)")
    add_trust_argument(parser)
    add_location_argument(parser)


def add_trust_argument(parser: Parser) -> None:
    """Add the option that permits running the code that a run's config names."""
    parser.add_argument("--trust", action="store_true", help="run the Python code that the run's config names")


def add_location_argument(parser: Parser) -> None:
    """Add the option that permits opening locations that a run's files refer to."""
    parser.add_argument(
        "--allow-location",
        dest="allowed_locations",
        action="append",
        default=[],
        metavar="URL",
        help="URL or folder that may be opened if the run's files refer to it, or to something in it; can be repeated",
    )


def add_prepare_options(parser: Parser, options_type: "type[PrepareOptions]") -> None:
    """Add a command-line option for each field of `options_type`."""
    for item in fields(options_type):
        settings = {key: item.metadata[key] for key in ("help", "metavar", "type", "choices")}
        parser.add_argument(f"--{item.name.replace('_', '-')}", default=item.default, **settings)


def read_prepare_options(options_type: type[Options], namespace: argparse.Namespace) -> Options:
    """Return an `options_type` with the values of parsed arguments."""
    return options_type(**{item.name: getattr(namespace, item.name) for item in fields(options_type)})
