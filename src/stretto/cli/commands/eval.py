"""`stretto eval`: the loss of a run's model on some data."""

from stretto.base.errors import ConfigError
from stretto.cli.parser import Parser, add_model_arguments


def run(arguments: list[str]) -> None:
    """Parse and evaluate."""
    options = make_parser().parse_all(arguments)
    from stretto.cli.views.result_views import show_evaluation
    from stretto.train.trained_model import load_model

    trained = load_model(options.run, options.device, trust=options.trust)
    data = options.data or trained.config.data.valid
    if data is None:
        raise ConfigError(f"{options.run} was trained without data.valid; name other data with --data FOLDER")
    show_evaluation(trained, data)


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(
        prog="stretto eval",
        description="Evaluate the model of a run: loss, perplexity, bits per byte, accuracy.",
        epilog="example:\n  stretto eval runs/first --data data/other",
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--data", metavar="FOLDER", help="the data's folder or URL; the run's own data.valid if not given"
    )
    return parser
