"""Errors of the library name parameters; the parser turns them into options."""

from dataclasses import fields

import pytest

from stretto.cli.commands.prepare import make_kind_parser
from stretto.cli.parser import Parser, read_prepare_options
from stretto.errors import ConfigError, DataError
from stretto.prepare.options import PrepareOptions, SequenceOptions, SeriesOptions, TextOptions

KINDS = {"text": TextOptions, "sequences": SequenceOptions, "series": SeriesOptions}


@pytest.fixture
def parser() -> Parser:
    parser = Parser("stretto test", "", "")
    parser.add_argument("--max-symbols", type=int)
    parser.add_argument("--label")
    parser.add_argument("--no-label", dest="has_label", action="store_false")
    parser.add_argument("--trust", action="store_true")
    parser.add_argument("--train.lr")
    return parser


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("max_symbols=3 is too small", "--max-symbols=3 is too small"),
        ("choose one (label=FIELD), or has_label=False", "choose one (--label=FIELD), or --no-label"),
        ("pass trust=True", "pass --trust"),
        ("data/label=3/a.csv is empty", "data/label=3/a.csv is empty"),
        ("model.label=3 and train.lr=4 are fields", "model.label=3 and train.lr=4 are fields"),
    ],
)
def test_parameters_become_options_but_paths_and_fields_stay(message: str, expected: str, parser: Parser) -> None:
    assert parser.add_dashes(message) == expected


def test_an_error_keeps_its_type_and_gets_the_dashes(parser: Parser) -> None:
    with pytest.raises(DataError, match=r"^--max-symbols=1 is too small$"), parser.parsed(["--max-symbols", "1"]):
        raise DataError("max_symbols=1 is too small")


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--max-symbol", "did you mean --max-symbols?"),
        ("--lr", "did you mean --train.lr?"),
        ("-label", "did you mean --label?"),
        ("--tag", "see `stretto test --help`"),
    ],
)
def test_only_a_similar_option_is_suggested(option: str, hint: str, parser: Parser) -> None:
    with pytest.raises(ConfigError) as caught:
        parser.parse_all([option])
    assert str(caught.value) == f"{option} is not an option of `stretto test`; {hint}"


def test_an_empty_argument_is_rejected(parser: Parser) -> None:
    with pytest.raises(ConfigError, match="is not an argument of `stretto test`"):
        parser.parse_all([""])


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_the_options_is_an_option_with_its_default(kind: str) -> None:
    options: type[PrepareOptions] = KINDS[kind]
    namespace = make_kind_parser(kind).parse_all(["a.txt", "--out", "out"])
    assert {item.name for item in fields(options)} <= set(vars(namespace))
    assert read_prepare_options(options, namespace) == options()
