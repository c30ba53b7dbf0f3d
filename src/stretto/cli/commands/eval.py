"""`stretto eval`: the loss and scores of a run's model on a data set.

Evaluate the model of a run: loss, perplexity, bits per byte, accuracy.

example:
  stretto eval runs/first --data data/other
"""

import argparse

from stretto.base.errors import ConfigError
from stretto.cli.parser import Parser, add_model_arguments


def add_arguments(parser: Parser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--data", metavar="FOLDER", help="folder or URL of the data (default: the run's data.valid)")


def run(options: argparse.Namespace) -> None:
    """Evaluate, and print the scores."""
    from stretto.cli.views.result_views import show_evaluation
    from stretto.train.trained_model import load_model

    trained = load_model(options.run, options.device, trust=options.trust)
    data = options.data or trained.config.data.valid
    if data is None:
        raise ConfigError(f"{options.run} was trained without data.valid; choose the data with --data=FOLDER")
    show_evaluation(trained, data)
