"""Python runs this first in every process that has this folder on its path. It kills one rank within a save.

KILL_RANK names the rank, KILL_SAVE which of its saves, KILL_AT the line of that save, counted as they are run, at which
the process kills itself. Lines of torch, safetensors and Python count too. The number of lines goes to KILL_COUNT.
"""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

_at, _save = int(os.environ.get("KILL_AT", -1)), int(os.environ.get("KILL_SAVE", 0))
_saves = _lines = 0
_thread = 0


def _trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:  # noqa: ANN401
    global _saves, _thread
    code = frame.f_code
    is_save = code.co_name == "_write_and_commit" and code.co_filename.endswith("checkpoint/manager.py")
    if is_save:
        _saves += 1
        _thread = threading.get_ident() if _saves == _save else 0
    if threading.get_ident() != _thread:
        return None
    return _trace_save if is_save else _trace_line


def _trace_line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:  # noqa: ANN401
    global _lines
    if event == "line":
        _lines += 1
        if _lines == _at:
            os.kill(os.getpid(), signal.SIGKILL)
    return _trace_line


def _trace_save(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:  # noqa: ANN401
    if event == "return":
        Path(os.environ["KILL_COUNT"]).write_text(str(_lines))
    _trace_line(frame, event, argument)
    return _trace_save


# Only in the first start: the ranks that take over must survive.
if os.environ.get("KILL_RANK") == os.environ.get("RANK", "") and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    threading.settrace(_trace)
