"""The command `stretto init`.

Inspect files or a folder (text, CSV, Parquet, JSONL, .npz), prepare the data, and write the TOML file of a run that is
ready to train. In a terminal, a few questions are asked, unless --yes is given.

example:
  stretto init book.txt
  stretto init reviews.jsonl --label stars --yes
  stretto init load.csv --time when --targets heat --horizon 24 --out heat.toml
"""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from stretto.base.disk import write_atomic
from stretto.base.errors import ConfigError
from stretto.base.remote import is_remote
from stretto.base.task import GIVEN_TARGET_KINDS, has_classes, has_own_length, is_per_row
from stretto.base.units import format_duration, pluralize
from stretto.cli.parser import Parser
from stretto.cli.views.console import make_console
from stretto.cli.views.result_views import show_preparation
from stretto.cli.views.store_lines import describe_classes, describe_skipped, describe_store
from stretto.prepare.compression import content_name
from stretto.prepare.downloads import localize
from stretto.prepare.file_listing import AmbiguousInputError, check_exists
from stretto.prepare.hints import DataHints
from stretto.prepare.inspection import Inspection, TextSchema, inspect_data
from stretto.prepare.options import LEVELS, split_names
from stretto.prepare.prepare_data import PreparedData, prepare_data
from stretto.prepare.row_reader import SkippedRows
from stretto.prepare.sequence_schema import SequenceSchema
from stretto.prepare.series_schema import SeriesSchema
from stretto.prepare.tokenizer import open_tokenizer
from stretto.store.sequences import Classes, Sequences

if TYPE_CHECKING:
    from stretto.config.run import RunConfig
    from stretto.train.suggest import Suggestion

_FORECAST_OPTIONS = ("horizon", "season", "context")
# The kinds of data that an option applies to; `sequences` covers sequences of text, of tokens and of channels.
_OPTION_KINDS: dict[str, tuple[str, ...]] = {
    "level": ("text", "sequences of text"),
    "max_symbols": ("text", "sequences of text"),
    "tokenizer": ("text", "sequences of text"),
    "sequence": ("sequences",),
    "label": ("sequences",),
    "no_label": ("sequences",),
    "time": ("series",),
    "time_format": ("series",),
    "by": ("series",),
    "inputs": ("sequences", "series"),
    "targets": ("series", "sequences"),
    "target_kind": ("sequences", "series"),
    "known_future": ("series",),
    "static": ("series",),
    "horizon": ("series", "sequences of channels"),
    "season": ("series", "sequences of channels"),
    "context": ("series", "sequences of channels"),
    "bad_rows": ("sequences", "series"),
    "nan": ("series", "sequences of channels"),
}


def add_arguments(parser: Parser) -> None:
    parser.usage = "stretto init PATH... [--out run.toml] [--name NAME] [--yes] [options]"
    # For the notes that `run` prints about the data: they name parameters of the library.
    parser.set_defaults(add_dashes=parser.add_dashes)
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="files (also .gz, .bz2, .zst), their URLs, or a folder of files")
    add("--out", type=Path, default=Path("run.toml"), metavar="FILE", help="file to write (default: run.toml)")
    add("--name", metavar="NAME", help="use the folders data/NAME and runs/NAME (default: the name of the first PATH)")
    add("--yes", action="store_true", help="ask no questions, and use the defaults")
    add("--force", action="store_true", help="overwrite the --out file, if it exists")
    _add_data_options(parser)


def _add_data_options(parser: Parser) -> None:
    add = parser.add_argument
    add("--kind", choices=["text", "sequences", "series"], help="what the files hold")
    formats = ["text", "jsonl", "csv", "parquet", "npz", "datasets"]
    add("--format", choices=formats, help="format of the files to use, if a folder holds several formats")
    add("--valid", nargs="+", metavar="FILE", help="files for validation, or their URLs")
    help_text = "fraction of the data for validation, if there are no files for it (default: 0.1, for series 0.2)"
    add("--validation-fraction", type=float, metavar="FRACTION", help=help_text)
    add("--level", choices=["byte", "char", "word"], help="text: what a token is")
    add("--max-symbols", type=int, metavar="N", help="text: maximum size of the vocabulary")
    add("--tokenizer", metavar="NAME", help="text: train subwords, as bpe:8000, or the path of a tokenizer.json")
    add("--sequence", metavar="FIELD", help="sequences: field with the sequence")
    add(
        "--inputs",
        type=split_names,
        metavar="A,B",
        help="sequences: fields of lists, series: columns, to read as channels",
    )
    add("--label", metavar="FIELD", help="sequences: field with the label")
    add("--no-label", dest="has_label", action="store_false", help="sequences: no label, predict the next time step")
    help_text = "what --targets are, if that is ambiguous; series: to predict each row, in place of a forecast"
    add("--target-kind", choices=GIVEN_TARGET_KINDS, metavar="KIND", help=help_text)
    add("--time", metavar="COLUMN", help="series: column of times")
    add("--time-format", metavar="FORMAT", help="series: how times are written, in directives of Python's strptime")
    add("--by", metavar="COLUMN", help="series: column that names the series of a row")
    add("--bad-rows", choices=["error", "skip"], help="an unreadable row is an error, or is skipped (default: error)")
    add("--nan", choices=["error", "missing"], help="NaN is an error, or is missing (default: error; series: inferred)")
    help_text = "fields or columns to predict (default: sequences: inferred; forecast: all)"
    add("--targets", type=split_names, metavar="A,B", help=help_text)
    help_text = "forecast: columns whose values are known ahead of time, such as prices"
    add("--known-future", type=split_names, metavar="A,B", help=help_text)
    add("--static", type=split_names, metavar="A,B", help="forecast: columns that are constant within a series")
    add("--horizon", type=int, metavar="N", help="forecast: number of time steps to predict")
    add("--season", type=int, metavar="N", help="forecast: predict the change over N time steps; 0: predict the value")
    add("--context", type=int, metavar="N", help="forecast: number of time steps that the network sees first")


def run(options: argparse.Namespace) -> None:
    """Inspect the files, ask questions, prepare the data, and write the TOML file."""
    _check_values(options)
    console = make_console()
    paths, valid = _localize(console, options.paths), _localize(console, options.valid or [])
    names = ("kind", "format", "level", "tokenizer", "sequence", "label", "has_label", "time", "by", "time_format")
    hints = DataHints(**{name: getattr(options, name) for name in names}, target_kind=options.target_kind)
    hints = replace(hints, inputs=options.inputs or (), targets=options.targets or ())
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty() and not options.yes
    prompter = _Prompter(console, paths, valid, is_interactive=is_interactive)
    inspection, hints = prompter.inspect(hints)
    _check_kind(options, inspection)
    console.print(f"found   {_describe_files(inspection)}")
    for note in inspection.notes:
        console.print(f"        {options.add_dashes(note)}")
    inspection = _add_known_columns(prompter.confirm(inspection, hints), options)
    console.print(f"task    {_describe_task(inspection, hints.targets)}")
    forecast, targets = prompter.choose_forecast(inspection, options)
    name = options.name or _default_name(paths[0])
    prepared = _prepare(console, inspection, Path("data") / name, options)
    folder = Path("runs") / name
    # Importing torch takes seconds, so do it only after errors in the options have been reported.
    from stretto.train.suggest import suggest

    suggestion = suggest(inspection, prepared, folder=folder, path=options.out, targets=targets, **forecast)
    write_atomic(options.out, suggestion.text.encode())
    _print_result(console, inspection, suggestion, options)


def _check_values(options: argparse.Namespace) -> None:
    """Reject invalid paths and options before any work is done."""
    for path in options.paths:
        if not is_remote(path):
            check_exists(Path(path))
    if options.out.exists() and not options.force:
        raise ConfigError(f"--out={options.out} already exists; choose a different file, or overwrite it with --force")
    if not options.out.absolute().parent.is_dir():
        raise ConfigError(f"--out={options.out}: the folder {options.out.parent} does not exist; create it first")
    if options.name is not None and not re.fullmatch(r"\w[\w.+-]*", options.name):
        raise ConfigError(f"--name={options.name} is not valid; use letters, digits and -_.+, but not -.+ at the start")
    for name in ("label", "targets"):
        if getattr(options, name) is not None and not options.has_label:
            given = f"--{name}={getattr(options, name)}"
            raise ConfigError(f"{given} and --no-label contradict each other; leave one of them out")
    open_tokenizer(options.tokenizer)
    same = [("tokenizer", "level"), ("tokenizer", "max_symbols")]
    for first, second in (("label", "targets"), ("sequence", "inputs"), *same):
        if getattr(options, first) is not None and getattr(options, second) is not None:
            dashed = second.replace("_", "-")
            problem = f"--{first}={getattr(options, first)} and --{dashed} contradict each other"
            raise ConfigError(f"{problem}; leave one of them out")
    if options.target_kind is not None and options.targets is None:
        raise ConfigError(f"--target-kind={options.target_kind} needs --targets; name their fields")
    for name in _FORECAST_OPTIONS:
        value, minimum = getattr(options, name), 0 if name == "season" else 1
        if value is not None and value < minimum:
            raise ConfigError(f"--{name}={value} must be at least {minimum}")


def _localize(console: Console, locations: list[str]) -> list[Path]:
    """Return the local paths of files; those behind URLs are downloaded."""
    paths = []
    for location in locations:
        if is_remote(location):
            console.print(f"fetch   {location}")
        paths.append(localize(location))
    return paths


def _check_kind(options: argparse.Namespace, inspection: Inspection) -> None:
    """Reject an option that has no effect on this kind of data."""
    schema = inspection.schema
    kind = (
        f"sequences of {schema.value_type or 'unknown type'}" if isinstance(schema, SequenceSchema) else inspection.kind
    )
    for name, kinds in _OPTION_KINDS.items():
        is_given = not options.has_label if name == "no_label" else getattr(options, name) is not None
        if is_given and not kind.startswith(kinds):
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is for {' and '.join(kinds)}, but the files hold {kind}; leave it out")


def _add_known_columns(inspection: Inspection, options: argparse.Namespace) -> Inspection:
    """Return the inspection with the columns of --known-future and --static in its schema."""
    schema = inspection.schema
    if not isinstance(schema, SeriesSchema):
        return inspection  # `_check_kind` has rejected the options
    known = {}
    for option in ("known_future", "static"):
        known[option] = tuple(getattr(options, option) or ())
        for name in known[option]:
            if name not in schema.columns and not (option == "static" and name == schema.by):
                dashed, columns = option.replace("_", "-"), ", ".join(schema.columns)
                raise ConfigError(f"--{dashed}={name} is not a column of numbers or categories; choose from {columns}")
    added = tuple(name for name in known["static"] if name == schema.by)  # the name of a series, as a category
    return replace(
        inspection,
        schema=replace(
            schema,
            columns=(*schema.columns, *added),
            categories=(*schema.categories, *added),
            known_future=known["known_future"],
            static=known["static"],
        ),
    )


class _Prompter:
    """Asks questions if `is_interactive`; otherwise uses the defaults, or raises where there is none."""

    def __init__(self, console: Console, paths: list[Path], valid: list[Path], *, is_interactive: bool) -> None:
        self._console = console
        self._paths, self._valid = paths, valid
        self._is_interactive = is_interactive

    def inspect(self, hints: DataHints) -> tuple[Inspection, DataHints]:
        """Inspect the files, and ask until nothing is ambiguous; also return the hints, with the answers added."""
        while True:
            try:
                return inspect_data(self._paths, hints, valid=self._valid), hints
            except AmbiguousInputError as ambiguity:
                if not self._is_interactive:
                    raise
                choice = self._ask_choice(ambiguity.question, ambiguity.choices, None)
                is_unlabeled = ambiguity.hint == "label" and choice == "none"
                hints = replace(hints, **({"has_label": False} if is_unlabeled else {ambiguity.hint: choice}))

    def confirm(self, inspection: Inspection, hints: DataHints) -> Inspection:
        """Ask for the label and the token level, unless `hints` has them; inspect again with the answers."""
        schema, new_hints = inspection.schema, hints
        if not self._is_interactive:
            return inspection
        if isinstance(schema, SequenceSchema) and schema.label is not None and hints.label is None:
            choice = self._ask_choice(
                "Which field is the label? (none: predict the next time step of the sequence)",
                (schema.label, *schema.other_labels, "none"),
                schema.label,
            )
            new_hints = replace(hints, has_label=False) if choice == "none" else replace(hints, label=choice)
        level = schema.level if isinstance(schema, TextSchema | SequenceSchema) else None
        has_words = isinstance(schema, SequenceSchema) and schema.has_words
        is_fixed = has_words or (isinstance(schema, TextSchema) and not schema.is_utf8)
        if level is not None and not is_fixed and hints.level is None and hints.tokenizer is None:
            choice = self._ask_choice("What should a token be?", LEVELS, level)
            # For the type checker, `choice` is any string; an element of LEVELS has the right type.
            new_hints = replace(new_hints, level=next(level for level in LEVELS if level == choice))
        return inspection if new_hints == hints else inspect_data(self._paths, new_hints, valid=self._valid)

    def choose_forecast(
        self, inspection: Inspection, options: argparse.Namespace
    ) -> tuple[dict[str, int | None], list[str]]:
        """Return horizon, season and context of a forecast (None: `suggest` decides), and its targets (empty: all)."""
        schema = inspection.schema
        forecast = {name: getattr(options, name) for name in _FORECAST_OPTIONS}
        targets = list(options.targets or ())
        if not isinstance(schema, SeriesSchema) or schema.targets:
            given_names = [name for name in _FORECAST_OPTIONS if getattr(options, name) is not None]
            predicted = () if isinstance(schema, TextSchema) else schema.target_fields
            if given_names and predicted:
                remedy = "add --no-label" if isinstance(schema, SequenceSchema) else "leave it out"
                raise ConfigError(
                    f"--{given_names[0]} is for a forecast, but the run predicts {predicted[0]!r}; {remedy}"
                )
            return forecast, [] if predicted else targets
        for name in targets:
            if name not in schema.numbers:
                columns = ", ".join(schema.numbers)
                raise ConfigError(f"--targets={name} is not a column of numbers; choose from {columns}")
        if self._is_interactive and not targets and len(schema.numbers) > 1:
            unknown = [name for name in schema.numbers if name not in (*schema.known_future, *schema.static)]
            choice = self._ask_choice("Which column do you want to forecast?", ("all", *unknown), "all")
            targets = [] if choice == "all" else [choice]
        if self._is_interactive and forecast["horizon"] is None:
            forecast["horizon"] = self._ask_number("How many time steps ahead?", schema.period or 8)
        return forecast, targets

    def _ask_choice(self, question: str, choices: tuple[str, ...], default: str | None) -> str:
        """Ask until the answer is one of the choices, by name or by number."""
        self._console.print(question)
        for number, choice in enumerate(choices, 1):
            self._console.print(f"  {number}. {choice}")
        while True:
            answer = self._read_answer(default or "")
            if not answer and default is not None:
                return default
            if answer in choices:
                return answer
            if answer.isdecimal() and 1 <= int(answer) <= len(choices):
                return choices[int(answer) - 1]
            self._console.print(f"Please enter one of these, or its number: {', '.join(choices)}")

    def _ask_number(self, question: str, default: int) -> int:
        self._console.print(question)
        while True:
            answer = self._read_answer(str(default))
            if not answer:
                return default
            if answer.isdecimal() and int(answer):
                return int(answer)
            self._console.print("Please enter a number, 1 or more.")

    def _read_answer(self, default: str) -> str:
        try:
            return input(f"[{default}] > " if default else "> ").strip()
        except EOFError:  # Ctrl-D; `main` prints the message after "interrupted"
            raise KeyboardInterrupt(": nothing was written") from None


def _prepare(console: Console, inspection: Inspection, folder: Path, options: argparse.Namespace) -> PreparedData:
    skipped: list[SkippedRows] = []
    with show_preparation(console) as on_progress:
        prepared = prepare_data(
            inspection,
            folder,
            validation_fraction=options.validation_fraction,
            max_symbols=options.max_symbols,
            bad_rows=options.bad_rows or "error",
            nan=options.nan,
            on_progress=on_progress,
            on_skipped=skipped.append,
        )
    for rows in skipped:
        console.print(describe_skipped(rows))
    for store in (prepared.train, prepared.valid):
        if store is not None:
            console.print(f"data    {describe_store(store)}")
            if isinstance(store, Sequences) and isinstance(store.fields.targets, Classes):
                console.print(f"        {describe_classes(store)}")
    if prepared.is_reused:
        console.print("        reused: the same files were prepared before")
    return prepared


def _describe_files(inspection: Inspection) -> str:
    paths, schema = inspection.paths, inspection.schema
    files = str(paths[0]) if len(paths) == 1 else f"{len(paths):,} files ({paths[0]}, ...)"
    if isinstance(schema, TextSchema):
        return f"text: {files}, {inspection.num_bytes:,} bytes"
    rows = f"about {inspection.num_rows:,} rows of {inspection.format}"
    if isinstance(schema, SequenceSchema):
        label = "" if schema.label is None else f", label {schema.label!r}"
        targets = f", targets {', '.join(map(repr, schema.targets))}" if schema.targets else ""
        names = ", ".join(map(repr, schema.inputs or (schema.sequence,)))
        content = "words" if schema.has_words else schema.value_type or "no sequences"
        return f"sequences: {files}, {rows}, {content} in {names}{label}{targets}"
    by = "" if schema.by is None else f", one series per {schema.by!r}"
    names = ", ".join(schema.numbers[:8]) + (", ..." if len(schema.numbers) > 8 else "")
    numbers = f", numbers in {names}" if names else ""
    categories = f", categories in {', '.join(schema.categories)}" if schema.categories else ""
    targets = f", targets {', '.join(map(repr, schema.targets))}" if schema.targets else ""
    return f"series: {files}, {rows}{by}{numbers}{categories}{targets}"


def _describe_task(inspection: Inspection, targets: Sequence[str]) -> str:
    schema = inspection.schema
    if isinstance(schema, TextSchema):
        return f"predict the next {schema.level}; state is carried along the text, in lanes"
    if isinstance(schema, SequenceSchema):
        tokens = "" if schema.level is None else f", read {schema.level} by {schema.level}"
        return f"predict {_describe_targets(schema)}{tokens}"
    if schema.targets:
        return f"predict {_describe_targets(schema)}"
    interval = "" if schema.seconds is None else f" (one row every {format_duration(schema.seconds)})"
    names = f" of {', '.join(targets)}" if targets else ""
    return f"forecast the next values{names}{interval}"


def _describe_targets(schema: SequenceSchema | SeriesSchema) -> str:
    names = ", ".join(map(repr, schema.target_fields))
    if schema.target_kind is None:
        return f"{names or 'the next time step'} of a sequence"
    row = "of a sequence" if isinstance(schema, SequenceSchema) else "of a series"
    if has_own_length(schema.target_kind):
        return f"the sequence {names} {row}"
    noun = "the class" if has_classes(schema.target_kind) else "the values of"
    return f"{noun} {names} {row if is_per_row(schema.target_kind) else 'of each time step'}"


def _print_result(
    console: Console, inspection: Inspection, suggestion: "Suggestion", options: argparse.Namespace
) -> None:
    """Print what the written run is, and the commands to use next."""
    config, train = suggestion.config, suggestion.config.train
    length = pluralize(train.steps, "step") if train.steps else pluralize(train.epochs, "epoch")
    model = f"{pluralize(config.model.layers, f'{config.model.cell} layer')} of {config.model.hidden} units"
    console.print(f"run     {options.out}: {model}, {length}; a comment explains each field")
    for note in suggestion.notes:
        console.print(f"        {options.add_dashes(note)}")
    if suggestion.baseline is not None:
        console.print(f"        baseline: {suggestion.baseline}, on the validation data")
    console.print("next")
    for command, comment in _next_commands(inspection, config, options.out):
        console.print(f"  stretto {command}  # {comment}")


def _next_commands(inspection: Inspection, config: "RunConfig", out: Path) -> list[tuple[str, str]]:
    """Return commands for the written run, without `stretto`, and what each is for."""
    schema, folder = inspection.schema, str(config.run.folder)
    run = shlex.quote(f"{folder}@best" if config.save.keep_best else folder)
    commands = [
        (f"train {shlex.quote(str(out))}", "takes at most a minute or two"),
        (f"report {shlex.quote(folder)}", "a page with the curves"),
    ]
    if config.data.valid is not None:
        commands.append((f"predict {run}", "predictions for the validation data; --data FILE: for a new file"))
    if inspection.kind == "text":
        commands.append((f"generate {run}", "text from the model"))
    if isinstance(schema, SeriesSchema) and not schema.targets:
        known, new_file = ", ".join(config.data.known_future or ()), _new_name(inspection.paths[0])
        if known:
            comment = f"a file like this one, followed by rows with only {known}"
            commands.append((f"forecast {run} --data {new_file}", comment))
        else:
            commands.append((f"forecast {run}", "the values after the end of the data"))
    return commands


def _new_name(path: Path) -> str:
    """Return the name of a new file like this one: `new.csv.gz` for `load.csv.gz`."""
    content = content_name(path)
    return f"new{content.suffix}{path.name.removeprefix(content.name)}"


def _default_name(path: Path) -> str:
    path = path.resolve()
    name = re.sub(r"[^\w.+-]+", "-", path.name if path.is_dir() else content_name(path).stem).strip("-.")
    return name or "data"
