"""The command `stretto completion`.

Print a script that makes a shell complete the commands, options and file names of `stretto`.

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
# Metavars of arguments that take a path or a URL: argparse reads them as text, but a shell can complete paths.
_PATH_METAVARS = ("RUN", "PATH", "DATA", "FOLDER")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")


def run(options: argparse.Namespace) -> None:
    """Print the script for a shell."""
    shtab = import_optional_dependency("shtab", "completion", "`stretto completion`")
    print(shtab.complete(_parser_of_all_commands(complete_path=shtab.FILE), options.shell))


def _parser_of_all_commands(complete_path: object) -> argparse.ArgumentParser:
    """Return one parser for all commands, with the arguments that take a path marked for shtab."""
    parser = argparse.ArgumentParser("stretto")
    commands = parser.add_subparsers()
    for name, summary in COMMANDS.items():
        if name == "prepare":
            # `prepare` has subcommands of its own: `stretto prepare text`.
            kinds = commands.add_parser(name, help=summary).add_subparsers()
            for kind, description in KINDS.items():
                command_parser = _mark_paths(make_kind_parser(kind), complete_path)
                kinds.add_parser(kind, help=description, parents=[command_parser], add_help=False)
        else:
            command_parser = _mark_paths(make_command_parser(name), complete_path)
            commands.add_parser(name, help=summary, parents=[command_parser], add_help=False)
    return parser


def _mark_paths(parser: Parser, complete_path: object) -> Parser:
    """Tell shtab which arguments of a parser take a path."""
    for action in parser._actions:
        if action.type is Path or action.metavar in _PATH_METAVARS:
            action.complete = complete_path  # type: ignore[attr-defined]  # an attribute that shtab reads
    return parser
