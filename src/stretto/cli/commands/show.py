"""`stretto show`: what is in a checkpoint or a run, who wrote it, how large it is, and whether it is whole."""

from stretto.cli.parser import Parser


def run(arguments: list[str]) -> None:
    """Parse and show."""
    options = make_parser().parse_all(arguments)
    from stretto.cli.views.checkpoint_tables import show_checkpoint

    show_checkpoint(options.path, is_quick=options.quick)


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(
        prog="stretto show",
        description="Show what a run has saved, and of its newest checkpoint, or of the one that is named: where it "
        "stood, which layout wrote it, its sizes, and whether each file is as it was written.",
        epilog="example:\n  stretto show runs/first\n  stretto show runs/first/checkpoints/step-000000400-g1",
    )
    parser.add_argument("path", metavar="PATH", help="a run's folder, or a checkpoint, or the URL of one")
    parser.add_argument("--quick", action="store_true", help="look at sizes only, don't read the files")
    return parser
