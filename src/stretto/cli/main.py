"""The command `stretto`: finds the room a subcommand lives in, and turns errors into one line and exit code 2."""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from stretto import __version__
from stretto.base.errors import ConfigError, StrettoError
from stretto.cli.parser import Parser

# Imported only when called for, so that help is instant and never wakes torch.
COMMANDS = {
    "init": "look at a file or a folder, prepare it, and write a run that trains",
    "doctor": "check this machine, or all of a job's, and say what to do about what is found",
    "prepare": "turn text, records or series into data to train on",
    "plan": "say which layout of a run is fastest on some devices, and why",
    "profile": "measure a run's model on this machine, for plans",
    "train": "train a model from a run's TOML file",
    "eval": "evaluate the model of a run",
    "predict": "write what a run's model says of each row of some data",
    "generate": "write text with a run's model",
    "forecast": "say what comes after the end of each series",
    "export": "write a run's model as ONNX, or as weights of torch's own modules",
    "import": "turn weights of Keras or torch into some that a run can begin with",
    "report": "make an HTML page of a run, or of several side by side",
    "show": "show what a run or a checkpoint holds, and whether it is whole",
    "verify": "check that a run's layout computes what one rank computes",
    "schema": "print the JSON schema of a run's TOML file, for editors",
    "completion": "print a script that completes this command in bash, zsh or tcsh",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code.

    0 done, 1 `verify` or `doctor` has found a problem, 2 the user's mistake, 75 start it again, 76 a newer start has
    gone on, 130 interrupted, 141 nobody reads.
    """
    try:
        options = _parser().parse_all(_check_command(sys.argv[1:] if arguments is None else list(arguments)))
        command = importlib.import_module(f"stretto.cli.commands.{options.command}")
        command.run(options.arguments)
        sys.stdout.flush()
    except StrettoError as error:
        if str(error):
            print(f"stretto: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        print(f"stretto: interrupted{interrupt}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`); Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _check_command(arguments: list[str]) -> list[str]:
    """Return the arguments, if they begin with a command or an option; answer a slip of the hand."""
    word = arguments[0] if arguments else "-"
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    if not word.startswith("-") and word not in COMMANDS:
        hint = f"did you mean {near[0]}?" if near else "see `stretto --help`"
        raise ConfigError(f"{word!r} is not a command; {hint}")
    return arguments


def entry() -> NoReturn:
    """The console script."""
    sys.exit(main())


def _parser() -> Parser:
    listing = "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())
    parser = Parser(
        prog="stretto",
        description="Train recurrent networks across many GPUs, exactly.",
        epilog=f"commands:\n{listing}\n\n`stretto COMMAND --help` tells more.",
    )
    parser.add_argument("--version", action="version", version=f"stretto {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help="one of the commands below")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False
    return parser
