"""spawn: runs a function on several ranks of this machine, from a script, a REPL or a notebook."""

import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from stretto.base.errors import ConfigError, LostPeerError, StrettoError
from stretto.base.extras import install_command
from stretto.base.reason import class_and_reason
from stretto.base.scratch import make_scratch_folder
from stretto.launch.rank_environment import rank_environments
from stretto.launch.rank_processes import RankProcesses
from stretto.launch.spawned_rank import TASK_FILE, RankResult, RankTask, dump_object, result_file
from stretto.mesh.launch_info import find_launch_info

Result = TypeVar("Result")


def spawn(function: Callable[..., Result], *arguments: Any, ranks: int = 2) -> list[Result]:  # noqa: ANN401
    """Call `function(*arguments)` on each of `ranks` new processes of this machine; return their results, by rank.

    In the function, `stretto.world()` joins the ranks, as in a script under torchrun. With accelerators, each rank uses
    its own. What ranks print appears here. If a rank fails, all end, and its error is raised: a `StrettoError` as it
    is, any other with a note that has the rank and its traceback. On Ctrl-C, ranks are interrupted and may save; on a
    second one, they are killed.

    The function, its arguments and its results are pickled. With the extra `notebook` (cloudpickle), the function may
    be defined anywhere, such as in a cell; without it, in a module, or in a script that calls `spawn` only under
    `if __name__ == "__main__":`, because each rank runs the script to define the function.
    """
    if not callable(function):
        raise ConfigError(f"spawn got an object of type {type(function).__name__}; pass a function, and its arguments")
    if ranks < 1:
        raise ConfigError(f"ranks={ranks} is not a number of processes to start; use at least 1")
    if find_launch_info(os.environ) is not None:
        raise ConfigError(
            "spawn was called on a rank that is already running; call it under `if __name__ == '__main__':`, in a "
            f"script that is started with python, or install cloudpickle: {install_command('notebook')}"
        )
    with make_scratch_folder() as folder:  # only this user can read it or write to it
        (Path(folder) / TASK_FILE).write_bytes(pickle.dumps(_make_task(function, arguments)))
        # In a file: it may be long. Python ignores entries that are no text, such as a Path.
        path_file = Path(folder) / "path.json"
        entries: list[object] = [*sys.path]
        path_file.write_text(json.dumps([entry for entry in entries if isinstance(entry, str)]))
        # -P: ranks must not import modules from the current folder, unless this process does.
        program = f"import json, pathlib, sys; sys.path[:] = json.loads(pathlib.Path({str(path_file)!r}).read_text()); "
        program += f"from stretto.launch.spawned_rank import run_rank; run_rank({folder!r})"
        command = [sys.executable, "-P", "-c", program]
        num_threads = max(1, (os.cpu_count() or 1) // ranks)
        with RankProcesses(command, rank_environments(ranks, num_threads)) as processes:
            processes.wait()
        failed_ranks = [rank for rank in processes.ended_ranks if _has_failed(Path(folder), rank, processes.exit_codes)]
        if failed_ranks:
            raise _find_error(Path(folder), failed_ranks, processes.exit_codes)
        return [_read_result(Path(folder), rank).value for rank in range(ranks)]


def _make_task(function: Callable[..., object], arguments: tuple[object, ...]) -> RankTask:
    name = getattr(function, "__qualname__", type(function).__name__)
    has_cloudpickle = find_spec("cloudpickle") is not None
    try:
        call = dump_object((function, arguments))
    except Exception as error:  # noqa: BLE001 - pickling calls the user's classes
        reason = class_and_reason(error)
        remedy = (
            "pass numbers, text, arrays or tensors, and create everything else in the function"
            if has_cloudpickle
            else f"define it at the top level of a module, or {install_command('notebook')}"
        )
        raise ConfigError(f"{name} or its arguments can't be sent to the ranks ({reason}); {remedy}") from None
    # Without cloudpickle, a function of the script is pickled as its name, so ranks must run the script first.
    needs_main = not has_cloudpickle and b"__main__" in call
    return RankTask(call, sys.argv, _find_main(name) if needs_main else None)


def _find_main(name: str) -> tuple[str, str]:
    """Return how a rank can run the script of this process: by the name of its module, or by its path."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return "module", spec.name
    path = getattr(main, "__file__", None)
    if path is None or not Path(path).is_file():
        raise ConfigError(
            f"{name} is defined in a cell or a prompt, so it can't be sent to the ranks without cloudpickle; "
            f"{install_command('notebook')}, or define it in a module"
        )
    return "path", str(Path(path).absolute())


def _read_result(folder: Path, rank: int) -> RankResult:
    result: RankResult = pickle.loads((folder / result_file(rank)).read_bytes())  # noqa: S301 - of our own rank
    return result


def _has_failed(folder: Path, rank: int, exit_codes: list[int]) -> bool:
    # A process that a library ends with code 0 has no result.
    return exit_codes[rank] != 0 or not (folder / result_file(rank)).exists()


def _find_error(folder: Path, failed_ranks: list[int], exit_codes: list[int]) -> BaseException:
    """Return the error of the rank that failed first; one that lost another rank is not the cause."""
    errors = [(rank, _rank_error(folder, rank, exit_codes[rank])) for rank in failed_ranks]
    rank, error = min(errors, key=lambda item: isinstance(item[1], LostPeerError))
    error.add_note(f"This is the error of rank {rank}, which stretto.spawn has started.")
    return error


def _rank_error(folder: Path, rank: int, exit_code: int) -> BaseException:
    if (folder / result_file(rank)).exists():
        result = _read_result(folder, rank)
        if result.error is not None:
            if result.trace:
                result.error.add_note(f"\n{result.trace}")
            return result.error
    if exit_code == 130:
        return KeyboardInterrupt()
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        remedy = "check whether the machine ran out of memory (dmesg)" if name == "SIGKILL" else "check its output"
        return LostPeerError(f"rank {rank} was killed by {name}, so the other ranks were stopped; {remedy}")
    return StrettoError(f"rank {rank} has exited with code {exit_code}; let the function return instead")
