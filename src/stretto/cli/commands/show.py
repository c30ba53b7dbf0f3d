"""The command `stretto show`.

Show a checkpoint: its training state, the launch and layout it was saved from, its size, and whether the checksum of
each file matches. For a run, list its checkpoints and launches, and show the newest checkpoint.

example:
  stretto show runs/first
  stretto show runs/first/checkpoints/step-000000400-g1
"""

import argparse

from stretto.cli.parser import Parser, add_location_argument


def add_arguments(parser: Parser) -> None:
    parser.add_argument("path", metavar="PATH", help="path or URL of a run's folder or of a checkpoint, or RUN@best")
    parser.add_argument("--quick", action="store_true", help="skip verifying the checksums of the files")
    add_location_argument(parser)


def run(options: argparse.Namespace) -> None:
    """Show the run or the checkpoint."""
    from stretto.cli.views.checkpoint_tables import show_run_or_checkpoint

    show_run_or_checkpoint(options.path, options.allowed_locations, is_quick=options.quick)
