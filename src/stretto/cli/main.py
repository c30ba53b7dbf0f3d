"""The command `stretto`: runs a subcommand, and turns errors into one line and an exit code."""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from stretto import __version__
from stretto.base.errors import ConfigError, StrettoError
from stretto.cli.parser import Parser
from stretto.cli.preemption import exit_on_preemption

# Names and summaries, so that `stretto --help` does not have to import the modules of the commands.
COMMANDS = {
    "init": "inspect files, prepare the data, and write the TOML file of a run",
    "doctor": "check this machine, or all machines of a job",
    "prepare": "convert text, records or tables to training data",
    "plan": "find the fastest layout for a run on the given devices, and say why",
    "profile": "measure the model of a run on this machine, for `stretto plan`",
    "train": "train a model, as described in a TOML file",
    "eval": "evaluate the model of a run",
    "predict": "write the predictions of a model for each row of a dataset",
    "generate": "generate text with the model of a run",
    "forecast": "forecast the values after the end of each series",
    "export": "export the model of a run to ONNX, or as weights of torch modules",
    "import": "convert weights from Keras or torch, to start a run from them",
    "report": "write an HTML page about a run, or a comparison of runs",
    "show": "show what a run or a checkpoint holds, and verify its checksums",
    "verify": "check that the layout of a run gives the same results as one rank",
    "manifest": "print a Kubernetes manifest that runs a TOML file on several nodes",
    "schema": "print the JSON schema of the TOML file, for editors",
    "completion": "print a completion script for bash, zsh or tcsh",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code.

    0 done, 1 `verify` or `doctor` found a problem, 2 an error that the user can fix, 75 not finished: launch it again,
    76 replaced by a newer launch of the run, 130 interrupted, 141 the output was piped to a process that has exited.
    """
    try:
        options = _make_parser().parse_all(_check_command(sys.argv[1:] if arguments is None else list(arguments)))
        run_command(options.command, options.arguments)
        sys.stdout.flush()
    except StrettoError as error:
        if str(error):
            print(f"stretto: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        # A command may raise it again with the rest of this line, such as ` at step 5: start it again to resume ...`.
        print(f"stretto: interrupted{interrupt}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has exited (`| head`). Python would fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def run_command(name: str, arguments: list[str]) -> None:
    """Parse the arguments of a command, and run it."""
    # If it is preempted, also while torch is imported or ranks start, it exits with the code for "launch it again".
    message = "stopped before the first step of this launch; nothing new was saved" if name == "train" else ""
    with exit_on_preemption(message), make_command_parser(name).parsed(arguments) as options:
        # A command that launches ranks launches itself again with this command line.
        options.command_line = [name, *arguments]
        importlib.import_module(f"stretto.cli.commands.{name}").run(options)


def make_command_parser(name: str) -> Parser:
    """Return the parser of a command. Its module's docstring has three parts: title, description, and help epilog."""
    command = importlib.import_module(f"stretto.cli.commands.{name}")
    _, _, text = (command.__doc__ or "").partition("\n\n")
    description, _, epilog = text.partition("\n\n")
    parser = Parser(f"stretto {name}", description, epilog)
    command.add_arguments(parser)
    return parser


def _check_command(arguments: list[str]) -> list[str]:
    """Return the arguments unchanged; raise if they start with neither a command nor an option."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        similar = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"did you mean {similar[0]}?" if similar else "see `stretto --help`"
        raise ConfigError(f"{arguments[0]!r} is not a command; {hint}")
    return arguments


def entry() -> NoReturn:
    """Run the command and exit with its code: the entry point of the console script."""
    # Data workers and other child processes that Python starts must not import modules from the current folder either.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    sys.exit(main())


def _make_parser() -> Parser:
    listing = "\n".join(f"  {name:<10} {summary}" for name, summary in COMMANDS.items())
    parser = Parser(
        prog="stretto",
        description="Train recurrent networks on many GPUs, with the same results as on one.",
        epilog=f"commands:\n{listing}\n\nFor the options of a command, see `stretto COMMAND --help`.",
    )
    parser.add_argument("--version", action="version", version=f"stretto {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help="one of the commands below")
    parser.add_remainder()
    return parser
