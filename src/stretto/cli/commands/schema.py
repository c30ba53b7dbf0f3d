"""The command `stretto schema`.

Print the JSON schema of a run's TOML file, for editors that offer completion and validation.

example:
  stretto schema > run.schema.json
"""

import argparse
import json

from stretto.cli.parser import Parser
from stretto.config.run import RunConfig


def add_arguments(parser: Parser) -> None:
    """Take no arguments."""


def run(_: argparse.Namespace) -> None:
    """Print the schema."""
    print(json.dumps(RunConfig.model_json_schema(), indent=2))
