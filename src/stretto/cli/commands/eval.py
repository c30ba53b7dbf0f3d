"""The command `stretto eval`.

Evaluate the model of a run: print its loss, and the scores of its task, such as perplexity or accuracy. If the run's
data comes from a function (data.factory), that is called, with --trust, for the validation data.

example:
  stretto eval runs/first --data data/other
"""

import argparse

from stretto.cli.parser import Parser, add_model_arguments


def add_arguments(parser: Parser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--data", metavar="FOLDER", help="prepared data: folder or URL (default: the run's data.valid)")


def run(options: argparse.Namespace) -> None:
    """Evaluate, and print the scores."""
    from stretto.cli.run_data import find_data, no_data_error
    from stretto.cli.run_model import load_run_model
    from stretto.cli.views.result_views import evaluate_and_show

    trained = load_run_model(options, options.device)
    data = options.data or find_data(options.run, trained.config, ["valid"], options.allowed_locations)
    if data is None and not (trained.config.data.factory is not None and options.trust):
        raise no_data_error(options.run, trained.config)
    evaluate_and_show(trained, data)
