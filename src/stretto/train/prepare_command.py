"""prepare_command: the command that prepares a file like the data of a run."""

import shlex
from pathlib import Path

from stretto.store.sequences import Origin
from stretto.train.data_spec import DataSpec


def prepare_command(file: Path | str, data_spec: DataSpec, train: str) -> str:
    """Return the command; `train` is the location of the run's own data."""
    origin = data_spec.origin
    if origin is None and data_spec.vocabulary is not None:
        return "stretto prepare " + shlex.join(["text", str(file), "--out", "FOLDER", "--vocabulary", train])
    origin = origin or Origin()
    words = ["sequences" if origin.inputs else "series", str(file), "--out", "FOLDER"]
    options = {"inputs": ",".join(origin.inputs), "targets": ",".join(origin.targets), "by": origin.by}
    options |= {"time": origin.time, "time-format": origin.time_format, "like": train}
    words += [word for name, value in options.items() if value for word in (f"--{name}", value)]
    return "stretto prepare " + shlex.join(words)
