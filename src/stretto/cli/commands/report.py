"""The command `stretto report`.

Make an HTML page about a run: curves, step timeline, load balance, failures and checkpoints. It opens from disk and
needs no network.

example:
  stretto report runs/first
  stretto report runs/first --out first.html
"""

import argparse
from pathlib import Path

from stretto.base.disk import explain_write_errors, write_atomic
from stretto.base.errors import ConfigError
from stretto.base.run_folder import REPORT
from stretto.cli.parser import Parser, add_location_argument

_DOCTYPE = b"<!doctype html>"


def add_arguments(parser: Parser) -> None:
    parser.usage = "stretto report RUN [--out FILE] [--allow-location FOLDER]"
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run's folder; the run may still be running")
    add("--out", type=Path, metavar="FILE", help="page to write (default: report.html in RUN)")
    add_location_argument(parser)


def run(options: argparse.Namespace) -> None:
    """Write the page and print where it is."""
    out = options.out or options.run / REPORT
    with explain_write_errors(f"--out={out}"):
        _check_out(options.run, out)
    from stretto.base.units import format_bytes
    from stretto.cli.views.console import make_console
    from stretto.cli.views.progress import show_fraction
    from stretto.report.run_page import render_run

    console = make_console()
    with show_fraction(console, "reading the log", stays=False) as on_progress:
        page = render_run(options.run, on_progress, allowed_locations=options.allowed_locations)
    content = page.encode("utf-8", "backslashreplace")  # a path that is not UTF-8 has lone surrogates
    with explain_write_errors(f"--out={out}"):
        write_atomic(out, content)
    console.print(f"the page is {out} ({format_bytes(len(content))}); open it in a browser")


def _check_out(run_folder: Path, out: Path) -> None:
    """Check that the page can be written, before minutes are spent on reading a long log."""
    if not run_folder.is_dir():
        return  # `read_record` reports this with a better message
    if out.is_dir():
        raise ConfigError(f"--out={out} is a folder; use the path of a file, like {out / 'report.html'}")
    if not out.parent.is_dir():
        raise ConfigError(f"--out={out} can't be written ({out.parent} does not exist); choose a different file")
    # A typo must not overwrite a log or a device.
    if out.exists() and not (out.is_file() and _is_page(out)):
        raise ConfigError(f"--out={out} exists and is not an HTML page; choose a different file")


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_DOCTYPE)) == _DOCTYPE
