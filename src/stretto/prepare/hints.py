"""DataHints: what you know about files before they are inspected."""

from dataclasses import dataclass
from typing import Literal

from stretto.base.task import TargetKind
from stretto.store.vocabulary import Level

DataKind = Literal["text", "sequences", "series"]


@dataclass(frozen=True)
class DataHints:
    """What you know about files before they are inspected; fields that are None or empty are inferred."""

    kind: DataKind | None = None
    format: str | None = None  # format of the files to use, if a folder holds several formats
    level: Level | None = None  # what a token of text is
    tokenizer: str | None = None  # in place of `level`: subwords, as `bpe:8000`, or the path of a tokenizer.json
    sequence: str | None = None  # field with the sequence
    label: str | None = None  # field with the label of a sequence
    has_label: bool = True  # False: there are no targets. True: if `label` and `targets` are not set, infer them
    time: str | None = None  # column with the time of a row
    by: str | None = None  # column that names the series of a row
    time_format: str | None = None  # how times are written, in directives of strptime
    inputs: tuple[str, ...] = ()  # instead of `sequence`: fields with a list of numbers or texts each, the channels
    targets: tuple[str, ...] = ()  # instead of `label`: fields with classes or values, per row or time step
    target_kind: TargetKind | None = None  # what the targets are
