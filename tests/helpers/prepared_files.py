"""Input files of each kind, and the same preparation of them in many ways."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from stretto.data import SequenceOptions, SeriesOptions, TextOptions, prepare_sequences, prepare_series, prepare_text
from stretto.prepare.prepare_job import Workers

KINDS = ("text", "sequences", "series")


@dataclass(frozen=True)
class Preparation:
    """A preparation of a kind, with several parts, a vocabulary or categories, and a validation split."""

    kind: str
    files: tuple[Path, ...]

    def run(self, target: Path | str, executor: Workers = None, **settings: Any) -> list[Any]:  # noqa: ANN401
        files = list(self.files)
        if self.kind == "text":
            text = TextOptions(level="word", max_symbols=50, validation_fraction=0.2, shard_bytes=600)
            return list(prepare_text(files, target, text, executor=executor, **settings))
        if self.kind == "sequences":
            records = SequenceOptions(level="word", label="label", validation_fraction=0.3, shard_bytes=600)
            return list(prepare_sequences(files, target, records, executor=executor, **settings))
        series = SeriesOptions(validation_fraction=0.2)
        return list(prepare_series(files, target, series, executor=executor, **settings))

    @property
    def command(self) -> list[str]:
        """The same as arguments of `stretto prepare`, without the target."""
        options = {
            "text": "--level word --max-symbols 50 --validation-fraction 0.2 --shard-bytes 600",
            "sequences": "--level word --label label --validation-fraction 0.3 --shard-bytes 600",
            "series": "--validation-fraction 0.2",
        }[self.kind]
        return [self.kind, *map(str, self.files), *options.split()]


def make_preparation(kind: str, folder: Path, num_rows: int = 120) -> Preparation:
    """Write the input files of a kind to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [f"w{row * row % 37} x{row % 11} end" for row in range(num_rows)]
    if kind == "text":
        (folder / "a.txt").write_text("".join(f"{line}\n" for line in words))
        (folder / "b.txt").write_text("".join(f"{line} more\n" for line in words))
        return Preparation(kind, (folder / "a.txt", folder / "b.txt"))
    if kind == "sequences":
        rows = [json.dumps({"text": line, "label": row % 3}) for row, line in enumerate(words)]
        (folder / "a.jsonl").write_text("\n".join(rows))
        return Preparation(kind, (folder / "a.jsonl",))
    paths = [folder / f"{number}.csv" for number in range(5)]
    for number, path in enumerate(paths):
        lines = [f"{row * number},{'red' if row % (number + 2) else 'blue'}" for row in range(num_rows)]
        path.write_text("\n".join(["value,color", *lines]))
    return Preparation(kind, tuple(paths))


def content(location: Path | str) -> dict[str, bytes]:
    """All files of a folder or URL, by their names in it."""
    filesystem, root = fsspec.core.url_to_fs(str(location))
    filesystem.invalidate_cache()
    # A server may list an empty folder as a file.
    paths = [path for path in map(str, filesystem.find(root)) if path.startswith(f"{root}/")]
    return {path.removeprefix(root): filesystem.cat_file(path) for path in paths}
