"""The command `stretto predict`.

Write the predictions of a run's model to a JSONL file: the label or values of a sequence or of its time steps, its
symbols (CTC), the loss and perplexity of a text, or a forecast. Each row appears once, in order, and the file is the
same for any number of ranks. After an interruption, run the same command again to resume.

example:
  stretto predict runs/reviews --data new.jsonl --out new.predictions.jsonl --ranks 2
"""

import argparse
import os
from pathlib import Path

from stretto.base.disk import refuse_existing
from stretto.base.errors import ConfigError
from stretto.base.remote import is_remote
from stretto.base.run_folder import PREDICTIONS, split_best
from stretto.cli.parser import Parser, add_model_arguments
from stretto.prepare.options import split_names

_IF_DIFFERENT = "if it has another name in the run's data"


def add_arguments(parser: Parser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument
    add(
        "--data",
        metavar="DATA",
        help="folder or URL of prepared data, or a file like the one the run's data was prepared from (default: the "
        "run's data.valid)",
    )
    add("--out", type=Path, metavar="FILE", help="file to write (default: RUN/predictions.jsonl)")
    add("--sequence", metavar="FIELD", help="field with the sequence, " + _IF_DIFFERENT)
    add("--label", metavar="FIELD", help="field with the true label, " + _IF_DIFFERENT)
    help_text = "fields with the true targets, if they have other names in the run's data"
    add("--targets", metavar="A,B", type=split_names, default=(), help=help_text)
    add("--by", metavar="COLUMN", help="column that identifies the series, " + _IF_DIFFERENT)
    help_text = "CTC: width of the prefix beam search (default: take the most likely path)"
    add("--beam", type=int, metavar="N", help=help_text)
    add("--ranks", type=int, default=1, metavar="N", help="number of ranks (default: 1)")


def run(options: argparse.Namespace) -> None:
    """Predict on the given number of ranks."""
    if options.ranks < 1:
        raise ConfigError(f"--ranks={options.ranks} must be at least 1")
    from stretto.cli.run_data import find_data, no_data_error
    from stretto.cli.run_model import load_run_model
    from stretto.cli.run_on_ranks import RankCommand, run_on_ranks
    from stretto.cli.views.prediction_view import predict_and_show
    from stretto.config.layout import Layout
    from stretto.mesh.launch_info import find_launch_info
    from stretto.mesh.world import World
    from stretto.serve.prediction import parts_folder
    from stretto.serve.source import FieldNames
    from stretto.train.trained_model import read_config

    allowed_locations = options.allowed_locations
    config = read_config(options.run, allowed_locations)
    data = options.data or find_data(options.run, config, ["valid"], allowed_locations)
    if data is None:
        raise no_data_error(options.run, config)
    out = _output_path(options.run, options.out)
    targets = options.targets if options.label is None else (options.label,)
    # The number of ranks that a launcher such as torchrun has started takes precedence over --ranks.
    launch_info = find_launch_info(os.environ)
    num_ranks = options.ranks if launch_info is None else launch_info.size

    def predict_on_rank(world: World, _: object) -> None:
        trained = load_run_model(options, str(world.device), is_quiet=not world.is_rank_zero)
        predict_and_show(trained, data, out, world, FieldNames(options.sequence, targets, options.by), options.beam)

    def check_output(_: object) -> None:
        if not parts_folder(out).exists():  # it exists after an interruption; then this command resumes
            refuse_existing("--out", out)

    check_output(config)  # `run_on_ranks` calls it only if it launches ranks: not for one rank, nor under torchrun
    run_section = config.run.model_copy(update={"device": options.device or config.run.device})
    config = config.model_copy(update={"layout": Layout(replicas=num_ranks), "run": run_section})
    command = RankCommand(
        options.command_line,
        predict_on_rank,
        check=check_output,
        max_restarts=None,
        progress=lambda: len(list(parts_folder(out).glob("*.jsonl"))),
    )
    run_on_ranks(config, command)


def _output_path(run: str, out: Path | None) -> Path:
    if out is not None:
        return out
    folder, _ = split_best(run)
    if is_remote(folder) or not Path(folder).is_dir():
        raise ConfigError(f"{folder} is not a local folder; choose where to write the predictions with --out=FILE")
    return Path(folder) / PREDICTIONS
