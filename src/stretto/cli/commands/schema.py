"""`stretto schema`: the JSON schema of a run's TOML file."""

import json

from stretto.cli.parser import Parser
from stretto.config.run import RunConfig


def run(arguments: list[str]) -> None:
    """Print the schema."""
    make_parser().parse_all(arguments)
    print(json.dumps(RunConfig.model_json_schema(), indent=2))


def make_parser() -> Parser:
    """Return the command's parser."""
    return Parser(
        prog="stretto schema",
        description="Print the JSON schema of a run's TOML file, for editors that complete and check.",
        epilog="example:\n  stretto schema > run.schema.json",
    )
