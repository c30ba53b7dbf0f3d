"""`stretto eval`: the loss and scores of a run's model on a data set."""

from stretto.base.errors import ConfigError
from stretto.cli.parser import Parser, add_model_arguments


def run(arguments: list[str]) -> None:
    """Parse and evaluate."""
    with make_parser().parsed(arguments) as options:
        from stretto.cli.views.result_views import show_evaluation
        from stretto.train.trained_model import load_model

        trained = load_model(options.run, options.device, trust=options.trust)
        data = options.data or trained.config.data.valid
        if data is None:
            raise ConfigError(f"{options.run} was trained without data.valid; choose the data with --data=FOLDER")
        show_evaluation(trained, data)


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(
        prog="stretto eval",
        description="Evaluate the model of a run: loss, perplexity, bits per byte, accuracy.",
        epilog="example:\n  stretto eval runs/first --data data/other",
    )
    add_model_arguments(parser)
    parser.add_argument("--data", metavar="FOLDER", help="folder or URL of the data (default: the run's data.valid)")
    return parser
