"""Read a run's folder into a `Record`. The log is read line by line, so it can be larger than memory."""

import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from stretto.base.errors import ConfigError, StrettoError
from stretto.base.run_folder import CONFIG, DATA_SPEC, LOG, RunFolder
from stretto.config.toml import parse_config
from stretto.report.record import JsonObject, Record

ProgressCallback = Callable[[float], None]


def read_record(folder: Path | str, on_progress: ProgressCallback = lambda fraction: None) -> Record:
    """Read a run's folder. `on_progress` is called now and then with the fraction of the log read so far."""
    folder = Path(folder)
    if not folder.exists():
        raise ConfigError(f"{folder} does not exist; give the folder of a run (run.folder in its config)")
    files = RunFolder(folder)
    if not files.log.is_file() and not files.config.is_file():
        problem = "is a file" if folder.is_file() else f"does not contain a run ({CONFIG} and {LOG} are missing)"
        raise ConfigError(f"{folder} {problem}; give the folder of a run (run.folder in its config)")
    raw_config = _read_object(files.config, tomllib.loads)
    try:
        config = parse_config(dict(raw_config))
    except StrettoError:
        config = None
    data_spec, plan = _read_object(files.file(DATA_SPEC), json.loads), _read_object(files.plan, json.loads)
    record = Record(folder, raw_config, config, data_spec, plan or None, files.is_finished, files.nonfinite_batches())
    for line in _lines(files.log, on_progress):
        record.add(line)
    return record


def _lines(path: Path, on_progress: ProgressCallback) -> Iterator[JsonObject | None]:
    """Yield the lines of a log as dicts; None for a damaged line, such as the last line of a run that was killed."""
    if not path.is_file():
        return
    try:
        size, num_read, reported = path.stat().st_size or 1, 0, 0.0
        with path.open("rb") as log:
            for content in log:
                num_read += len(content)
                if num_read / size > reported + 0.01:
                    reported = num_read / size
                    on_progress(min(reported, 1.0))
                try:
                    line = from_json(content)
                except ValueError:
                    line = None
                if isinstance(line, dict):
                    yield line
                elif content.strip():
                    yield None
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}); check its permissions") from None


def _read_object(path: Path, parse: Callable[[str], Any]) -> JsonObject:
    """Parse a small TOML or JSON file; return {} if it is missing or damaged, since a report can do without it."""
    try:
        tree = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}
