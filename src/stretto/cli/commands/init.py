"""`stretto init`: from someone's data to a run that trains, with few questions."""

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from stretto.base.disk import write_atomic
from stretto.base.errors import ConfigError
from stretto.cli.parser import Parser
from stretto.cli.views.console import make_console

if TYPE_CHECKING:
    from stretto.prepare.inspection import Inspection
    from stretto.prepare.prepare_data import PreparedData
    from stretto.prepare.record_parser import SkippedRows
    from stretto.train.suggest import Suggestion

_FORECAST = ("horizon", "season", "context")
# What an option is for; sequences may hold text, tokens or channels.
_OPTION_KINDS: dict[str, tuple[str, ...]] = {
    "level": ("text", "sequences of text"),
    "max_symbols": ("text", "sequences of text"),
    "sequence": ("sequences",),
    "label": ("sequences",),
    "no_label": ("sequences",),
    "time": ("series",),
    "by": ("series",),
    "targets": ("series", "sequences of channels"),
    "horizon": ("series", "sequences of channels"),
    "season": ("series", "sequences of channels"),
    "context": ("series", "sequences of channels"),
    "bad_rows": ("sequences", "series"),
    "nan": ("series", "sequences of channels"),
}


def run(arguments: list[str]) -> None:
    """Parse, look, ask, prepare, and write."""
    options = _parser().parse_all(arguments)
    _check(options)
    console = make_console()
    answers = {name: getattr(options, name) for name in ("kind", "format", "level", "sequence", "label", "time", "by")}
    answers |= {"is_labeled": not options.no_label, "valid": options.valid or ()}
    asker = _Prompter(console, is_interactive=sys.stdin.isatty() and sys.stdout.isatty() and not options.yes)
    found = asker.inspect(options.paths, answers)
    _check_options(options, found)
    _print_inspection(console, found)
    found = asker.confirm(options.paths, answers, found)
    console.print(f"task    {_describe_task(found)}")
    forecast, targets = asker.choose_targets(found, options)
    name = options.name or _default_name(options.paths[0])
    folder = Path("data") / name
    prepared = _prepare(console, found, folder, options)
    _print_stores(console, prepared)
    from stretto.train.suggest import suggest

    suggestion = suggest(found, prepared, folder=Path("runs") / name, path=options.out, targets=targets, **forecast)
    write_atomic(options.out, suggestion.text.encode())
    _print_next_steps(console, found, suggestion, options.out)


def _check(options: argparse.Namespace) -> None:
    """Find what is wrong before any work is done."""
    if options.out.exists() and not options.force:
        raise ConfigError(f"{options.out} is there already; name another with --out, or write over it with --force")
    if not options.out.absolute().parent.is_dir():
        raise ConfigError(f"--out={options.out}: the folder {options.out.parent} is not there; make it first")
    if options.name is not None and not re.fullmatch(r"[\w][\w.+-]*", options.name):
        raise ConfigError(f"--name={options.name} can't name a folder; use letters, digits, - and _")
    if options.label is not None and options.no_label:
        raise ConfigError(f"--label={options.label} and --no-label contradict each other; leave one of them out")
    for name in _FORECAST:
        given, least = getattr(options, name), 0 if name == "season" else 1
        if given is not None and given < least:
            raise ConfigError(f"--{name}={given} should be {least} or more; leave it out")


def _check_options(options: argparse.Namespace, found: "Inspection") -> None:
    """Refuse an option that has no meaning for what was found."""
    kind = found.kind if found.kind != "sequences" else f"sequences of {found.sequence_type}"
    for name, kinds in _OPTION_KINDS.items():
        if getattr(options, name) not in (None, False) and not kind.startswith(kinds):
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is for {' and '.join(kinds)}, and this is {kind}; leave it out")


class _Prompter:
    """Asks in a terminal; elsewhere takes what is usual."""

    def __init__(self, console: Console, *, is_interactive: bool) -> None:
        self._console = console
        self._is_interactive = is_interactive

    def inspect(self, paths: list[Path], answers: dict[str, Any]) -> "Inspection":
        """Look until nothing is unclear; keep what was asked in the answers."""
        from stretto.prepare.file_listing import AmbiguousInputError
        from stretto.prepare.inspection import inspect_data

        while True:
            try:
                return inspect_data(paths, **answers)
            except AmbiguousInputError as unclear:
                if not self._is_interactive:
                    raise
                choice = self._ask_choice(unclear.question, unclear.choices, None)
                is_none = unclear.option == "label" and choice == "none"
                answers |= {"is_labeled": False} if is_none else {unclear.option: choice}

    def confirm(self, paths: list[Path], answers: dict[str, Any], found: "Inspection") -> "Inspection":
        """Ask what could be otherwise, if nobody has said it yet."""
        from stretto.prepare.inspection import inspect_data

        again = dict(answers)
        if self._is_interactive and found.label is not None and answers["label"] is None:
            choice = self._ask_choice(
                "Which field is the label? (none: go on with the sequence)",
                (found.label, *found.labels, "none"),
                found.label,
            )
            again |= {"is_labeled": False} if choice == "none" else {"label": choice}
        if self._is_interactive and found.level is not None and found.is_utf8 and answers["level"] is None:
            again["level"] = self._ask_choice("What is a token of the text?", ("byte", "char", "word"), found.level)
        return found if again == answers else inspect_data(paths, **again)

    def choose_targets(
        self, found: "Inspection", options: argparse.Namespace
    ) -> tuple[dict[str, int | None], list[str]]:
        """What a forecast is asked for."""
        forecast = {name: getattr(options, name) for name in _FORECAST}
        targets = [] if options.targets is None else [name.strip() for name in options.targets.split(",")]
        if found.kind != "series":
            given = next((name for name in (*_FORECAST, "targets") if getattr(options, name) is not None), None)
            if given is not None and found.label is not None:
                raise ConfigError(f"--{given} is for a forecast, not for the label {found.label!r}; say --no-label")
            return forecast, targets
        for name in targets:
            if name not in found.columns:
                raise ConfigError(f"--targets={name} is not a column of numbers; there are {', '.join(found.columns)}")
        if self._is_interactive and not targets and len(found.columns) > 1:
            choice = self._ask_choice("Which column is to be forecast?", ("all", *found.columns), "all")
            targets = [] if choice == "all" else [choice]
        if self._is_interactive and forecast["horizon"] is None:
            forecast["horizon"] = self._ask_number("How many steps ahead?", found.period or 8)
        return forecast, targets

    def _ask_choice(self, question: str, choices: tuple[str, ...], default: str | None) -> str:
        """Ask until the answer is one of the choices, by name or by number."""
        self._console.print(question)
        for number, choice in enumerate(choices, 1):
            self._console.print(f"  {number}. {choice}")
        while True:
            said = self._read_answer("" if default is None else default)
            if not said and default is not None:
                return default
            if said in choices:
                return said
            if said.isdecimal() and 1 <= int(said) <= len(choices):
                return choices[int(said) - 1]
            self._console.print(f"Give one of these, or its number: {', '.join(choices)}")

    def _ask_number(self, question: str, default: int) -> int:
        self._console.print(question)
        while True:
            said = self._read_answer(str(default))
            if not said:
                return default
            if said.isdecimal() and int(said):
                return int(said)
            self._console.print("Give a number, 1 or more.")

    def _read_answer(self, default: str) -> str:
        try:
            return input(f"[{default}] > " if default else "> ").strip()
        except EOFError:
            raise KeyboardInterrupt(": nothing was written") from None


def _prepare(console: Console, found: "Inspection", folder: Path, options: argparse.Namespace) -> "PreparedData":
    from stretto.cli.views.result_views import PrepareView
    from stretto.prepare.prepare_data import prepare_data

    skipped: list[SkippedRows] = []
    try:
        with PrepareView(console) as view:
            prepared = prepare_data(
                found,
                folder,
                validation_fraction=options.validation_fraction,
                max_symbols=options.max_symbols,
                bad_rows=options.bad_rows or "refuse",
                nan=options.nan,
                on_progress=view.show,
                on_skipped=skipped.append,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(": what is finished is kept; run the same command again to go on") from None
    for rows in skipped:
        console.print(f"left out {rows.summary}; the first: {rows.first}")
    return prepared


def _print_inspection(console: Console, found: "Inspection") -> None:
    console.print(f"found   {_describe(found)}")
    for note in found.notes:
        console.print(f"        {note}")


def _describe(found: "Inspection") -> str:
    files = str(found.paths[0]) if len(found.paths) == 1 else f"{len(found.paths):,} files, the first {found.paths[0]}"
    if found.kind == "text":
        return f"text: {files}, {found.num_bytes:,} bytes"
    rows = f"about {found.num_rows:,} rows of {found.format}"
    if found.kind == "sequences":
        label = "" if found.label is None else f", label {found.label!r}"
        return f"sequences: {files}, {rows}, {found.sequence_type} in {found.sequence!r}{label}"
    by = "" if found.by is None else f", a series for each {found.by!r}"
    names = ", ".join(found.columns[:8]) + (", ..." if len(found.columns) > 8 else "")
    return f"series: {files}, {rows}{by}, numbers in {names}"


def _describe_task(found: "Inspection") -> str:
    from stretto.plan.units import format_duration

    if found.kind == "text":
        return f"which {found.level} comes next? State is carried through the text, in lanes"
    if found.kind == "sequences":
        tokens = "" if found.level is None else f" Read {found.level} by {found.level}"
        if found.label is not None:
            return f"which {found.label!r} does a sequence have?{tokens}"
        return f"what comes next in a sequence?{tokens}"
    apart = "" if found.seconds is None else f" (rows are {format_duration(found.seconds)} apart"
    apart += "" if not apart else ")" if not found.period else f", and repeat themselves after {found.period})"
    return f"what are the next values?{apart}"


def _print_stores(console: Console, prepared: "PreparedData") -> None:
    from stretto.cli.commands.prepare import describe_store

    for store in (prepared.train, prepared.valid):
        if store is not None:
            console.print(f"data    {describe_store(store)}")
    if prepared.is_reused:
        console.print("        made before from the same files, and used again")


def _print_next_steps(console: Console, found: "Inspection", suggestion: "Suggestion", out: Path) -> None:
    config = suggestion.config
    folder = str(config.run.folder)
    length = (
        f"{config.train.steps:,} steps"
        if config.train.steps
        else f"{config.train.epochs} epoch{'s' * (config.train.epochs > 1)}"
    )
    model = f"{config.model.layers} x {config.model.cell} of {config.model.hidden}"
    console.print(f"run     {out}: {model}, {length}; every line says why")
    if suggestion.naive_loss is not None:
        naive = f"repeats the last {config.data.season} steps has a loss of {suggestion.naive_loss:.4f}"
        console.print(f"        a forecast that {naive}: beat that")
    commands = [("train", str(out), "about a minute or two"), ("report", folder, "a page with its curves")]
    if config.data.valid is not None:
        commands.append(("predict", folder, "what it says of the held-out data"))
    if found.kind == "text":
        commands.append(("generate", folder, "text from the model"))
    if found.kind == "series":
        commands.append(("forecast", folder, "what comes after the data"))
    console.print("next")
    for command, path, what in commands:
        console.print(f"  stretto {command} {shlex.quote(path)}  # {what}")


def _default_name(path: Path) -> str:
    found = path.resolve()
    name = re.sub(r"[^\w.+-]+", "-", found.name if found.is_dir() else found.stem).strip("-.")
    return name or "data"


def _parser() -> Parser:
    parser = Parser(
        prog="stretto init",
        usage="stretto init PATH... [--out run.toml] [--name NAME] [--yes] [options]",
        description="Look at files or a folder (text, CSV, Parquet, JSONL), prepare what is there, and write a run's\n"
        "TOML file that trains as it is. Asks a few questions in a terminal, and none elsewhere.",
        epilog="example:\n  stretto init book.txt\n  stretto init reviews.jsonl --label stars --yes\n"
        "  stretto init load.csv --time when --targets heat --horizon 24 --out heat.toml",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="files, or a folder of them")
    parser.add_argument("--out", type=Path, default=Path("run.toml"), metavar="FILE", help="default: run.toml")
    parser.add_argument("--name", metavar="NAME", help="data goes to data/NAME, the run to runs/NAME (default: PATH's)")
    parser.add_argument("--yes", action="store_true", help="ask nothing: take what is usual")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    parser.add_argument(
        "--kind", dest="kind", choices=["text", "sequences", "series"], help="what it is, where that is unclear"
    )
    parser.add_argument(
        "--format", choices=["text", "jsonl", "csv", "parquet", "datasets"], help="which files of a folder are meant"
    )
    parser.add_argument("--valid", type=Path, nargs="+", metavar="FILE", help="held-out files")
    parser.add_argument(
        "--validation-fraction",
        type=float,
        metavar="PART",
        help="else, the part to hold out (default: 0.1, of series 0.2)",
    )
    parser.add_argument("--level", choices=["byte", "char", "word"], help="text: what a token is")
    parser.add_argument("--max-symbols", type=int, metavar="N", help="text: keep only the N most frequent symbols")
    parser.add_argument("--sequence", metavar="FIELD", help="sequences: the field with the sequence")
    parser.add_argument("--label", metavar="FIELD", help="sequences: the field with the label")
    parser.add_argument("--no-label", action="store_true", help="sequences: no label, go on with the sequence")
    parser.add_argument("--time", metavar="COLUMN", help="series: the column of times")
    parser.add_argument("--by", metavar="COLUMN", help="series: the column that tells series apart")
    parser.add_argument("--targets", metavar="A,B", help="series: the columns to forecast (default: all)")
    parser.add_argument("--horizon", type=int, metavar="N", help="series: steps ahead")
    parser.add_argument("--season", type=int, metavar="N", help="series: compare with N steps before; 0 doesn't")
    parser.add_argument("--context", type=int, metavar="N", help="series: steps that a forecast looks at")
    parser.add_argument("--bad-rows", choices=["refuse", "skip"], help="default: refuse")
    parser.add_argument("--nan", choices=["refuse", "missing"], help="what a NaN is: a bad row, or a missing value")
    return parser
