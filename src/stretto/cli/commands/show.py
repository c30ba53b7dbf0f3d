"""The command `stretto show`.

Show a checkpoint: its training state, the launch and layout it was saved from, its size, and whether the checksum of
each file matches. For a run, list its checkpoints and launches, and show the newest checkpoint. For the TOML file of a
run, show its model: blocks, output shapes, weights, states, and the share of each block in the cost. If the file names
Python code (model.factory, model.loss or data.factory), that code runs, so it needs --trust. For a folder of prepared
data, show what it holds: rows, time steps, fields, classes with their numbers, categories, and how values are scaled.

example:
  stretto show run.toml
  stretto show data/first
  stretto show runs/first
  stretto show runs/first/checkpoints/step-000000400-g1
"""

import argparse
from pathlib import Path

from stretto.cli.parser import Parser, add_location_argument, add_trust_argument
from stretto.config.toml import load_config


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "path",
        metavar="PATH",
        help="path or URL of a run's folder or of a checkpoint, RUN@best, a TOML file, or a folder of data",
    )
    parser.add_argument("--quick", action="store_true", help="skip verifying the checksums of the files")
    add_trust_argument(parser)
    add_location_argument(parser)


def run(options: argparse.Namespace) -> None:
    """Show the run, the checkpoint, the prepared data, or the model that a TOML file describes."""
    if options.path.endswith(".toml"):
        from stretto.cli.views.model_view import show_model
        from stretto.train.user_code import check_trusted

        config = load_config(Path(options.path))
        show_model(check_trusted(config, options.path, options.trust, opens_data=True, evaluates=True))
        return
    from stretto.cli.views.store_view import find_stores, show_stores

    if folders := find_stores(options.path):
        show_stores(folders)
        return
    from stretto.cli.views.checkpoint_tables import show_run_or_checkpoint

    show_run_or_checkpoint(options.path, options.allowed_locations, is_quick=options.quick)
