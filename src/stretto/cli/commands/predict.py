"""`stretto predict`: what a run's model says of each row of some data, in order, on any number of ranks."""

import os
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.base.remote import is_remote
from stretto.cli.parser import Parser, add_model_arguments, refuse_existing

_NAME_DIFFERS = "if it is not called as in the run's own files"


def run(arguments: list[str]) -> None:
    """Parse, and predict on the ranks that were asked for."""
    options = make_parser().parse_all(arguments)
    if options.ranks < 1:
        raise ConfigError(f"--ranks={options.ranks} is not a number from 1 on; use at least 1")
    from stretto.cli.run_on_ranks import run_on_ranks
    from stretto.cli.views.prediction_view import show_predictions
    from stretto.config.layout import Layout
    from stretto.mesh.launch_info import find_launch_info
    from stretto.mesh.world import World
    from stretto.serve.prediction import parts_folder
    from stretto.serve.source import FieldNames
    from stretto.train.trained_model import load_model, read_config

    config = read_config(options.run)
    data = options.data or config.data.valid
    if data is None:
        raise ConfigError(f"{options.run} was trained without data.valid; name the data with --data")
    out = _output_path(options.run, options.out)
    # Whoever has started several has said how many.
    launch_info = find_launch_info(os.environ)
    num_ranks = options.ranks if launch_info is None else launch_info.size

    def predict_on_rank(world: World, _: object) -> None:
        trained = load_model(options.run, str(world.device), trust=options.trust)
        show_predictions(trained, data, out, world, FieldNames(options.sequence, options.label, options.by))

    def check(_: object) -> None:
        if not parts_folder(out).exists():
            refuse_existing("--out", out)

    check(config)
    run_on_ranks(
        config.model_copy(
            update={
                "layout": Layout(replicas=num_ranks),
                "run": config.run.model_copy(update={"device": options.device or config.run.device}),
            }
        ),
        ["predict", *arguments],
        predict_on_rank,
        check,
        restarts=None if num_ranks > 1 else 0,
        progress=lambda: len(list(parts_folder(out).glob("*.jsonl"))),
    )


def _output_path(run: str, out: Path | None) -> Path:
    if out is not None:
        return out
    if is_remote(run) or not Path(run).is_dir():
        raise ConfigError(f"{run} is not a folder of this machine; say where the predictions go with --out FILE")
    return Path(run) / "predictions.jsonl"


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(
        prog="stretto predict",
        description="Write what a run's model says of each row of some data to a file of JSON lines: the label of a "
        "sequence, how likely a text is, or a forecast. Each row once, in order, the same on any number of ranks; "
        "cut off, the same command goes on.",
        epilog="example:\n  stretto predict runs/reviews --data new.jsonl --out new.predictions.jsonl --ranks 2",
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--data",
        metavar="DATA",
        help="a prepared folder or its URL, or a file as the run's own data was prepared from; the run's data.valid if "
        "not given",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where the predictions go (default: RUN/predictions.jsonl)"
    )
    parser.add_argument(
        "--sequence", metavar="FIELD", help="the field of a file's records with the sequence, " + _NAME_DIFFERS
    )
    parser.add_argument("--label", metavar="FIELD", help="the field with the true class, " + _NAME_DIFFERS)
    parser.add_argument("--by", metavar="COLUMN", help="the column of a table that names a series, " + _NAME_DIFFERS)
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="how many ranks share the work (default: 1)")
    return parser
