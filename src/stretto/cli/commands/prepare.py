"""The command `stretto prepare`.

Convert files to prepared data: shards with checksums and a small index.

For the options of a kind, see `stretto prepare KIND --help`.

example:
  stretto prepare text book.txt --out data/book --level word --validation-fraction 0.1
  stretto prepare text book.txt --out data/subwords --tokenizer bpe:8000
  srun stretto prepare text part-*.txt --out s3://bucket/data
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from stretto.base.errors import DataError
from stretto.cli.parser import Parser, add_prepare_options, read_prepare_options
from stretto.cli.views.console import make_console
from stretto.cli.views.result_views import show_preparation
from stretto.cli.views.store_lines import describe_skipped, describe_store
from stretto.mesh.launch_info import LaunchInfo, find_launch_info
from stretto.prepare.categories import OnNote
from stretto.prepare.executors import open_executor
from stretto.prepare.launcher_ranks import Ranks, RankZeroError
from stretto.prepare.options import SequenceOptions, SeriesOptions, TextOptions
from stretto.prepare.prepare_job import OnProgress, Workers
from stretto.prepare.prepare_sequences import prepare_sequences
from stretto.prepare.prepare_series import prepare_series
from stretto.prepare.prepare_text import prepare_text
from stretto.prepare.row_reader import OnSkipped, SkippedRows
from stretto.store.corpus import Corpus
from stretto.store.sequences import Sequences

KINDS = {
    "text": "text files, as one long stream of tokens",
    "sequences": "records, each a sequence of text, tokens or numbers, with or without a label",
    "series": "tables whose rows are time steps",
}


def add_arguments(parser: Parser) -> None:
    parser.usage = "stretto prepare KIND FILE... --out FOLDER [options]"
    listing = "\n".join(f"  {name:<10} {description}" for name, description in KINDS.items())
    parser.epilog = f"kinds:\n{listing}\n\n{parser.epilog}"
    parser.add_argument("kind", metavar="KIND", choices=KINDS, help="what the files hold, one of the kinds below")
    parser.add_remainder()


def run(options: argparse.Namespace) -> None:
    """Prepare, and describe the result."""
    launch_info = find_launch_info(os.environ)
    # All ranks of a launcher prepare the same data, but one prints.
    is_quiet = launch_info is not None and launch_info.rank > 0
    console = make_console(is_quiet=is_quiet)
    skipped: list[SkippedRows] = []
    notes: list[str] = []
    # `parsed` also rewrites errors that are raised below: they name options, not the library's parameters.
    with (
        make_kind_parser(options.kind).parsed(options.arguments) as kind_options,
        show_preparation(console, partial_folder=f"{kind_options.out}.partial") as on_progress,
        _choose_workers(kind_options.on, launch_info) as executor,
        _reported_once(),
    ):
        stores = _prepare(options.kind, kind_options, executor, on_progress, skipped.append, notes.append)
    for store in stores:
        console.print(describe_store(store))
    for rows in skipped:
        console.print(describe_skipped(rows))
    for note in notes:
        console.print(note)


@contextmanager
def _reported_once() -> Iterator[None]:
    """Print an error of all ranks only on rank 0."""
    try:
        yield
    except RankZeroError:
        raise DataError("") from None  # nothing is printed


@contextmanager
def _choose_workers(on: str | None, launch_info: LaunchInfo | None) -> Iterator[Workers]:
    """Return what runs the parts: the ranks of a launcher if there are several, what `--on` names, or None."""
    if on is not None and launch_info is not None and launch_info.size > 1:
        raise DataError(f"on={on} is not possible on {launch_info.size} ranks; start one process, or leave it out")
    if on is not None:
        with open_executor(on) as executor:
            yield executor
    else:
        yield None if launch_info is None or launch_info.size == 1 else Ranks(launch_info.rank, launch_info.size)


def _prepare(
    kind: str,
    options: argparse.Namespace,
    executor: Workers,
    on_progress: OnProgress,
    on_skipped: OnSkipped,
    on_note: OnNote,
) -> list[Corpus] | list[Sequences]:
    files, folder, workers = options.files, options.out, options.workers
    if kind == "text":
        text_options = read_prepare_options(TextOptions, options)
        return prepare_text(files, folder, text_options, workers=workers, executor=executor, on_progress=on_progress)
    prepare_records = partial(
        prepare_sequences if kind == "sequences" else prepare_series,
        files,
        folder,
        workers=workers,
        executor=executor,
        on_progress=on_progress,
        on_skipped=on_skipped,
        on_note=on_note,
    )
    return prepare_records(read_prepare_options(SequenceOptions if kind == "sequences" else SeriesOptions, options))


def make_kind_parser(kind: str) -> Parser:
    """Return the parser of `stretto prepare KIND`."""
    options_type, description, files_help, example = {
        "text": (
            TextOptions,
            "Convert text files to a corpus: one long stream of tokens.",
            "text files, in order; in UTF-8, unless --level is byte",
            "text book.txt --out data/book --level word --validation-fraction 0.1",
        ),
        "sequences": (
            SequenceOptions,
            "Convert records to sequences of text, tokens or numbers: each record is one sequence.",
            "JSONL, CSV, Parquet or .npz files, or folders written by save_to_disk of Hugging Face datasets",
            "sequences reviews.jsonl --out data/reviews --label stars --validation-fraction 0.1",
        ),
        "series": (
            SeriesOptions,
            "Convert tables to series of numbers: each row is one time step.",
            "CSV, Parquet or JSONL files",
            "series load.csv --out data/load --time when --by meter --validation-fraction 0.1",
        ),
    }[kind]
    parser = Parser(f"stretto prepare {kind}", description, f"example:\n  stretto prepare {example}")
    # Not a Path: that would turn a URL into a local folder.
    parser.add_argument("files", nargs="+", metavar="FILE", help=f"{files_help}; paths or URLs")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where to write the data; a new folder or URL")
    add_prepare_options(parser, options_type)
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes (default: as many as pay off)")
    on_help = "use a cluster instead: ray, ray=HOST:PORT, ray://HOST:PORT or dask=HOST:PORT"
    parser.add_argument("--on", metavar="CLUSTER", help=on_help)
    return parser
