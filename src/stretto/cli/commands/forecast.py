"""`stretto forecast`: what comes after the end of each series, as a run's model sees it."""

from pathlib import Path

from stretto.cli.parser import Parser, add_model_arguments, refuse_existing


def run(arguments: list[str]) -> None:
    """Parse and forecast."""
    options = make_parser().parse_all(arguments)
    if options.out is not None:
        refuse_existing("--out", options.out)
    from stretto.cli.views.prediction_view import show_forecast
    from stretto.train.trained_model import load_model

    trained = load_model(options.run, options.device, trust=options.trust)
    data = options.data or trained.config.data.valid or trained.config.data.train
    show_forecast(trained, data, options.steps, options.out, options.by)


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(
        prog="stretto forecast",
        description="Say what comes after the end of each series, in its own units: a table of the first series, and "
        "all of them in a CSV file.",
        epilog="example:\n  stretto forecast runs/load --data load.csv --out tomorrow.csv",
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--data",
        metavar="DATA",
        help="a prepared folder or its URL, or a table as the run's own data was prepared from; the run's held-out "
        "data if not given",
    )
    parser.add_argument(
        "--by", metavar="COLUMN", help="the column that names a series, if it is not called as in the run's own files"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="how many steps (default: the run's data.horizon)")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="write all series there")
    return parser
