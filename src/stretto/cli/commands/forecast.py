"""The command `stretto forecast`.

Forecast the values after the end of each series, in the units of its data. Print the forecast for the first series,
and with --out write the forecasts for all series to a CSV file. With a file as --data that has the time column of the
run's data, each forecast has its time.

example:
  stretto forecast runs/load --data load.csv --out tomorrow.csv
"""

import argparse
from pathlib import Path

from stretto.base.disk import refuse_existing
from stretto.base.errors import ConfigError
from stretto.cli.parser import Parser, add_model_arguments


def add_arguments(parser: Parser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument
    add(
        "--data",
        metavar="DATA",
        help="folder or URL of prepared data, or a table like the one the run's data was prepared from (default: the "
        "run's data.valid, else data.train)",
    )
    add("--by", metavar="COLUMN", help="column that identifies the series, if it has another name in the run's data")
    add("--steps", type=int, metavar="N", help="number of time steps to forecast (default: the run's data.horizon)")
    add("--out", type=Path, metavar="FILE.csv", help="write the forecasts for all series to this file")


def run(options: argparse.Namespace) -> None:
    """Forecast, and print and write the values."""
    if options.out is not None:
        refuse_existing("--out", options.out)
    from stretto.cli.run_data import find_data
    from stretto.cli.run_model import load_run_model
    from stretto.cli.views.prediction_view import forecast_and_show

    trained = load_run_model(options, options.device)
    data = options.data or find_data(options.run, trained.config, ["valid", "train"], options.allowed_locations)
    if data is None:
        raise ConfigError(f"{options.run} was trained on data.factory; choose the data with --data=DATA")
    forecast_and_show(trained, data, options.steps, options.out, options.by)
