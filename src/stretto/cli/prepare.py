"""`stretto prepare text`: text files into a corpus."""

from pathlib import Path

from rich.console import Console

from stretto.cli.parser import Parser
from stretto.cli.screen import PrepareView
from stretto.data.corpus import Corpus
from stretto.data.prepare import prepare_text


def run(arguments: list[str]) -> None:
    """Parse and prepare."""
    options = _parser().parse_all(arguments)
    vocabulary = None if options.vocabulary is None else Corpus.open(options.vocabulary).vocabulary
    console = Console(markup=False)
    with PrepareView(console) as view:
        corpora = prepare_text(
            options.files,
            options.out,
            options.level,
            vocabulary=vocabulary,
            max_symbols=options.max_symbols,
            hold_out=options.hold_out,
            on_progress=view.show,
        )
    for corpus in corpora:
        console.print(
            f"{corpus.folder}: {corpus.num_tokens:,} tokens, {corpus.vocabulary.level} vocabulary of "
            f"{len(corpus.vocabulary):,}{_unknown(corpus)}, from {corpus.num_bytes:,} bytes of text",
            highlight=False,
            soft_wrap=True,
        )


def _unknown(corpus: Corpus) -> str:
    return f" ({corpus.num_unknown / corpus.num_tokens:.1%} unknown)" if corpus.vocabulary.level != "byte" else ""


def _parser() -> Parser:
    parser = Parser(
        prog="stretto prepare",
        description="Turn text files into a corpus: memory-mapped tokens with a small index.",
        epilog="example:\n  stretto prepare text book.txt --out data/book --level word --hold-out 0.1",
    )
    parser.add_argument("kind", choices=["text"], help="what the files hold")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="the files, in order, UTF-8")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the corpus goes; must be new")
    parser.add_argument("--level", choices=["byte", "char", "word"], help="what a token is (default: byte)")
    parser.add_argument(
        "--vocabulary",
        type=Path,
        metavar="FOLDER",
        help="take the vocabulary of this corpus rather than count one",
    )
    parser.add_argument(
        "--max-symbols", type=int, metavar="N", help="keep only the N most frequent characters or words"
    )
    parser.add_argument(
        "--hold-out", type=float, default=0.0, metavar="PART",
        help="hold out the last part of the text, such as 0.1: writes FOLDER/train and FOLDER/valid",
    )  # fmt: skip
    return parser
