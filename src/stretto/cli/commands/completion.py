"""`stretto completion`: a script that teaches a shell to complete commands, options and files.

Print a script that teaches a shell to complete this command, its options and files.

example:
  stretto completion bash > ~/.local/share/bash-completion/completions/stretto
  stretto completion zsh > ~/.zfunc/_stretto

For zsh, ~/.zfunc has to be in $fpath before compinit is called.
"""

import argparse
from pathlib import Path

from stretto.base.extras import import_optional_dependency
from stretto.cli.commands.prepare import KINDS, make_kind_parser
from stretto.cli.main import COMMANDS, make_command_parser
from stretto.cli.parser import Parser

SHELLS = ("bash", "zsh", "tcsh")
# Arguments that name a file or a folder, although they are text because a URL may stand there too.
_PATHS = ("RUN", "PATH")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")


def run(options: argparse.Namespace) -> None:
    """Print the script for a shell."""
    shtab = import_optional_dependency("shtab", "completion", "`stretto completion`")
    print(shtab.complete(_whole_parser(complete_path=shtab.FILE), options.shell))


def _whole_parser(complete_path: object) -> argparse.ArgumentParser:
    """Return one parser for all commands, with a note for shtab beside each argument that takes a path."""
    whole = argparse.ArgumentParser("stretto")
    commands = whole.add_subparsers()
    for name, summary in COMMANDS.items():
        if name == "prepare":
            # A second word before the options: `stretto prepare text`.
            kinds = commands.add_parser(name, help=summary).add_subparsers()
            for kind, description in KINDS.items():
                _add(kinds, kind, description, make_kind_parser(kind), complete_path)
        else:
            _add(commands, name, summary, make_command_parser(name), complete_path)
    return whole


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    summary: str,
    parser: Parser,
    complete_path: object,
) -> None:
    for action in parser._actions:
        if action.type is Path or action.metavar in _PATHS:
            # The attribute by which shtab learns how to complete an argument.
            action.complete = complete_path  # type: ignore[attr-defined]
    commands.add_parser(name, help=summary, parents=[parser], add_help=False)
