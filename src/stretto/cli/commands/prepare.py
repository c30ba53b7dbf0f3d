"""`stretto prepare`: text, records or series into a store."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from stretto.cli.parser import Parser
from stretto.cli.views.console import make_console
from stretto.cli.views.result_views import PrepareView

if TYPE_CHECKING:
    from stretto.prepare.record_parser import SkippedRows
    from stretto.store.corpus import Corpus
    from stretto.store.sequences import Sequences
    from stretto.store.vocabulary import Vocabulary

KINDS = {
    "text": "text files, as one long run of tokens",
    "sequences": "records, each a sequence of text, tokens or numbers, with a label or without",
    "series": "tables whose rows are steps of time",
}

# Beyond this many sequences, their lengths are not read once more only to say which is in the middle.
_MAX_LENGTHS = 10**7


def run(arguments: list[str]) -> None:
    """Parse and prepare."""
    choice = _kinds_parser().parse_all(arguments)
    options = PARSERS[choice.kind]().parse_all(choice.arguments)
    console = make_console()
    try:
        RUNS[choice.kind](options, console)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f": what is finished is kept in {options.out}.partial; run the same command again to go on"
        ) from None


def _run_text(options: argparse.Namespace, console: Console) -> None:
    from stretto.prepare.prepare_text import prepare_text

    with PrepareView(console) as view:
        corpora = prepare_text(
            options.files,
            options.out,
            options.level,
            vocabulary=_open_vocabulary(options.vocabulary),
            max_symbols=options.max_symbols,
            validation_fraction=options.validation_fraction,
            shard_bytes=options.shard_bytes,
            workers=options.workers,
            on_progress=view.show,
        )
    for corpus in corpora:
        console.print(_describe_corpus(corpus))


def _run_sequences(options: argparse.Namespace, console: Console) -> None:
    from stretto.prepare.prepare_sequences import prepare_sequences

    skipped: list[SkippedRows] = []
    with PrepareView(console) as view:
        stores = prepare_sequences(
            options.files,
            options.out,
            sequence=options.sequence,
            label=options.label,
            read_as=options.read_as,
            level=options.level,
            vocabulary=_open_vocabulary(options.vocabulary),
            max_symbols=options.max_symbols,
            num_tokens=options.num_tokens,
            like=options.like,
            validation_fraction=options.validation_fraction,
            seed=options.seed,
            bad_rows=options.bad_rows,
            nan=options.nan,
            shard_bytes=options.shard_bytes,
            workers=options.workers,
            on_progress=view.show,
            on_skipped=skipped.append,
        )
    _print_sequences(console, stores, skipped)


def _run_series(options: argparse.Namespace, console: Console) -> None:
    from stretto.prepare.prepare_series import prepare_series

    skipped: list[SkippedRows] = []
    with PrepareView(console) as view:
        stores = prepare_series(
            options.files,
            options.out,
            columns=None if options.columns is None else [name.strip() for name in options.columns.split(",")],
            by=options.by,
            time=options.time,
            like=options.like,
            validation_fraction=options.validation_fraction,
            bad_rows=options.bad_rows,
            nan=options.nan,
            workers=options.workers,
            on_progress=view.show,
            on_skipped=skipped.append,
        )
    _print_sequences(console, stores, skipped)


RUNS: dict[str, Callable[[argparse.Namespace, Console], None]] = {
    "text": _run_text,
    "sequences": _run_sequences,
    "series": _run_series,
}


def _open_vocabulary(location: str | None) -> "Vocabulary | None":
    if location is None:
        return None
    from stretto.store.index import Store
    from stretto.store.vocabulary import FILE, parse_vocabulary

    return parse_vocabulary(Store.open(location).read_file(FILE), location)


def describe_store(store: "Corpus | Sequences") -> str:
    """Return what a store holds, in a line."""
    from stretto.store.corpus import Corpus

    return _describe_corpus(store) if isinstance(store, Corpus) else _describe_sequences(store)


def _describe_corpus(corpus: "Corpus") -> str:
    is_byte = corpus.vocabulary.level == "byte"
    unknown = "" if is_byte else f" ({corpus.num_unknown / corpus.num_tokens:.1%} unknown)"
    return (
        f"{corpus.location}: {corpus.num_tokens:,} tokens, {corpus.vocabulary.level} vocabulary of "
        f"{len(corpus.vocabulary):,}{unknown}, from {corpus.num_bytes:,} bytes of text"
    )


def _print_sequences(console: Console, stores: "list[Sequences]", skipped: "list[SkippedRows]") -> None:
    for store in stores:
        console.print(_describe_sequences(store))
    for rows in skipped:
        console.print(f"left out {rows.summary}; the first: {rows.first}")


def _describe_sequences(store: "Sequences") -> str:
    from stretto.store.sequences import Channels

    values, labels = store.fields.values, store.fields.labels
    if isinstance(values, Channels):
        names = ", ".join(values.names[:5]) + (", ..." if len(values.names) > 5 else "")
        what = f"{_count(len(values.names), 'channel')} ({names})"
    elif store.vocabulary is not None:
        what = f"{store.vocabulary.level} vocabulary of {values.num_tokens:,}"
    else:
        what = f"{values.num_tokens:,} different tokens"
    classes = "" if labels is None else f", {len(labels.names):,} classes"
    return (
        f"{store.location}: {_count(store.num_sequences, 'sequence')} of {_describe_lengths(store)} steps, "
        f"{store.num_steps:,} in all, {what}{classes}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _describe_lengths(store: "Sequences") -> str:
    import numpy as np

    if store.num_sequences > _MAX_LENGTHS:
        return f"up to {store.longest:,}"
    lengths = np.concatenate([np.diff(store.ends(shard, 0, size)) for shard, size in enumerate(store.shard_sizes)])
    return f"{lengths.min():,} to {lengths.max():,} (median {int(np.median(lengths)):,})"


def _kinds_parser() -> Parser:
    listing = "\n".join(f"  {name:<10} {what}" for name, what in KINDS.items())
    parser = Parser(
        prog="stretto prepare",
        description="Turn files into data to train on: shards with checksums and a small index.",
        usage="stretto prepare KIND FILE... --out FOLDER [options]",
        epilog=f"kinds:\n{listing}\n\n`stretto prepare KIND --help` tells more.\n\n"
        "example:\n  stretto prepare text book.txt --out data/book --level word --validation-fraction 0.1",
    )
    parser.add_argument("kind", metavar="KIND", choices=KINDS, help="what the files hold, one of the kinds below")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False
    return parser


def _text_parser() -> Parser:
    parser = Parser(
        prog="stretto prepare text",
        description="Turn text files into a corpus: one long run of tokens.",
        epilog="example:\n  stretto prepare text book.txt --out data/book --level word --validation-fraction 0.1",
    )
    _add_common(parser, "the files, in order, UTF-8", "hold out the last part of the text")
    _add_vocabulary(parser)
    return parser


def _sequences_parser() -> Parser:
    parser = Parser(
        prog="stretto prepare sequences",
        description="Turn records into sequences of text, tokens or numbers: one record, one sequence.",
        epilog="example:\n  stretto prepare sequences reviews.jsonl --out data/reviews --label stars --level word "
        "--validation-fraction 0.1",
    )
    _add_common(
        parser,
        "JSONL, CSV or Parquet files, or folders that datasets' save_to_disk wrote",
        "hold out sequences drawn at random",
    )
    parser.add_argument(
        "--sequence", metavar="FIELD", help="the field with the sequence (default: text, tokens or values)"
    )
    parser.add_argument("--label", metavar="FIELD", help="the field with the class of the sequence, text or a number")
    parser.add_argument(
        "--read-as", choices=["text", "tokens", "channels"],
        help="what the sequence is made of (default: as the first record looks)",
    )  # fmt: skip
    _add_vocabulary(parser)
    parser.add_argument(
        "--num-tokens", type=int, metavar="N", help="how many tokens there are (default: the largest in the data + 1)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is held out (default: 0)")
    _add_rows(parser, "vocabulary, classes and statistics")
    return parser


def _series_parser() -> Parser:
    parser = Parser(
        prog="stretto prepare series",
        description="Turn tables into series of numbers: one row, one step of time.",
        epilog="example:\n  stretto prepare series load.csv --out data/load --time when --by meter --validation-fraction 0.1",
    )
    _add_common(parser, "CSV, Parquet or JSONL files", "hold out the last part of each series")
    parser.add_argument("--columns", metavar="A,B,...", help="the channels (default: all columns of numbers)")
    parser.add_argument("--by", metavar="COLUMN", help="what names a series (default: each file is one)")
    parser.add_argument("--time", metavar="COLUMN", help="a time, which must not decrease within a series")
    _add_rows(parser, "columns and statistics")
    return parser


PARSERS: dict[str, Callable[[], Parser]] = {
    "text": _text_parser,
    "sequences": _sequences_parser,
    "series": _series_parser,
}


def _add_common(parser: Parser, files: str, validation_help: str) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=files)
    # As text: a path would make a local folder of a URL, which is to be refused.
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the data goes; must be new")
    parser.add_argument(
        "--validation-fraction", type=float, default=0.0, metavar="PART",
        help=f"{validation_help}, such as 0.1: writes FOLDER/train and FOLDER/valid",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=int, metavar="N", help="how many processes work on it (default: as many as it is worth)"
    )


def _add_vocabulary(parser: Parser) -> None:
    parser.add_argument("--level", choices=["byte", "char", "word"], help="what a token of text is (default: byte)")
    parser.add_argument(
        "--vocabulary", metavar="FOLDER", help="take the vocabulary of this prepared data rather than count one"
    )
    parser.add_argument(
        "--max-symbols", type=int, metavar="N", help="keep only the N most frequent characters or words"
    )
    parser.add_argument(
        "--shard-bytes", type=int, default=64 << 20, metavar="N",
        help="how much text, JSONL or Parquet becomes one shard (default: 64 MiB); a CSV file is always one",
    )  # fmt: skip


def _add_rows(parser: Parser, schema_parts: str) -> None:
    parser.add_argument("--like", metavar="FOLDER", help=f"take {schema_parts} from this prepared data")
    parser.add_argument(
        "--bad-rows", choices=["refuse", "skip"], default="refuse",
        help="what to do with a row that can't be read (default: refuse)",
    )  # fmt: skip
    parser.add_argument(
        "--nan", choices=["refuse", "missing"], default="refuse",
        help="what a NaN or an infinity is: a bad row, or a missing value (default: refuse)",
    )  # fmt: skip
