"""What a rank that `stretto.spawn` has started does: read a function from a file, call it, and write the result.

Both files are in a folder that only this user can write to, so they are as trustworthy as the parent process.
"""

import os
import pickle
import runpy
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from stretto.base.disk import write_atomic
from stretto.base.errors import ConfigError, StrettoError
from stretto.base.exit import exit_immediately
from stretto.base.reason import class_and_reason
from stretto.launch.parent_exit import exit_when_launcher_dies

TASK_FILE = "task"


@dataclass(frozen=True)
class RankTask:
    """What each rank calls. `main` is the script that must run first, as (`module` or `path`, its name or path)."""

    call: bytes  # the pickled function and its arguments
    argv: list[str]
    main: tuple[str, str] | None = None


@dataclass(frozen=True)
class RankResult:
    """What a rank's function has returned or raised; `trace` is the error's traceback, empty for a StrettoError."""

    value: Any = None
    error: Exception | None = None
    trace: str = ""


def result_file(rank: int | str) -> str:
    """Return the name of the file with a rank's result."""
    return f"result-{rank}"


def dump_object(value: object) -> bytes:
    """Pickle an object; with cloudpickle, if it is installed, also functions and classes of a script or a cell."""
    try:
        import cloudpickle  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return pickle.dumps(value)
    return bytes(cloudpickle.dumps(value))


def run_rank(folder: str) -> None:
    """Run the task in `folder` on this rank; write its result, or its error."""
    exit_when_launcher_dies()
    path = Path(folder) / result_file(os.environ["RANK"])
    try:
        task: RankTask = pickle.loads((Path(folder) / TASK_FILE).read_bytes())  # noqa: S301 - from our parent
        sys.argv[:] = task.argv
        if task.main is not None:
            _load_main(*task.main)
        function, arguments = pickle.loads(task.call)  # noqa: S301 - from our parent
        _write_value(path, function(*arguments))
    except KeyboardInterrupt:
        exit_immediately(130)
    except StrettoError as error:
        _write_error(path, error, "")
        exit_immediately(error.exit_code)
    except SystemExit as error:
        # Its code may be 0, but the other ranks must end, too.
        _write_error(path, StrettoError(f"the function called sys.exit({error.code!r}); let it return instead"), "")
        exit_immediately(1)
    except Exception as error:  # noqa: BLE001 - whatever the user's function raises
        _write_error(path, error, traceback.format_exc())
        # Not a normal exit: that could wait for other ranks, which must see the connections of this one close.
        exit_immediately(1)


def _load_main(kind: str, source: str) -> None:
    """Run the script that called `spawn`, except for its `if __name__ == "__main__":`, to define its functions here."""
    name = "__mp_main__"  # the name that Python's own child processes use
    run = runpy.run_module if kind == "module" else runpy.run_path
    module = ModuleType(name)
    module.__dict__.update(run(source, run_name=name))
    sys.modules["__main__"] = sys.modules[name] = module


def _write_value(path: Path, value: object) -> None:
    try:
        content = dump_object(RankResult(value))
    except Exception as error:  # noqa: BLE001 - pickling calls the user's classes
        reason = class_and_reason(error)
        raise ConfigError(
            f"the function returned an object of type {type(value).__name__}, which can't be sent back ({reason}); "
            "return numbers, text, arrays or tensors"
        ) from None
    write_atomic(path, content)


def _write_error(path: Path, error: Exception, trace: str) -> None:
    try:
        content = dump_object(RankResult(error=error, trace=trace))
        pickle.loads(content)  # noqa: S301 - fails here rather than in the parent
    except Exception:  # noqa: BLE001 - pickling calls the user's classes
        # Not the error itself: its class may have arguments that pickle can't pass to it.
        summary = RuntimeError(f"{type(error).__name__}: {error}")
        content = dump_object(RankResult(error=summary, trace=trace))
    write_atomic(path, content)
