"""Read a run's folder into a `Record`. The log is read line by line, so it can be larger than memory."""

from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic_core import from_json

from stretto.base.bounded_read import parse_json
from stretto.base.errors import ConfigError, DataError, StrettoError
from stretto.base.log_segments import list_segments, segment_lines
from stretto.base.redact import redact
from stretto.base.run_folder import CONFIG, DATA_SPEC, LOG, RunFolder
from stretto.config.toml import parse_config, read_toml
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
    record = Record(folder, {}, None, _read_object(files, DATA_SPEC), files.is_finished, files.nonfinite_batches())
    try:
        record.raw_config = redact(read_toml(files.config))  # reports are shared
        record.config = parse_config(dict(record.raw_config), str(files.config))
    except StrettoError as error:
        record.config_problem = str(error)
    for line in _lines(files.log, on_progress):
        record.add(line)
    return record


def _lines(log: Path, on_progress: ProgressCallback) -> Iterator[JsonObject | None]:
    """Yield the lines of a log as dicts; None for a damaged line, such as the last line of a run that was killed."""
    try:
        segments = list_segments(log)
        size, num_read, reported = sum(segment.stop for segment in segments) or 1, 0, 0.0
        for content in segment_lines(segments):
            num_read += len(content or b"")
            if num_read / size > reported + 0.01:
                reported = num_read / size
                on_progress(min(reported, 1.0))
            try:
                line = None if content is None else from_json(content)
            except ValueError:
                line = None
            if isinstance(line, dict):
                yield line
            elif content is None or content.strip():
                yield None
    except OSError as error:
        raise ConfigError(f"{log} can't be read ({error.strerror}); check its permissions") from None


def _read_object(files: RunFolder, name: str) -> JsonObject:
    """Parse a small JSON file; return {} if it is missing or damaged, since a report can do without it."""
    try:
        tree = parse_json((files.read(name) or b"").decode())
    except (OSError, ValueError, DataError):
        return {}
    return tree if isinstance(tree, dict) else {}
