"""stretto.spawn: ranks from a script, a prompt or a test, their results, output and errors."""

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import stretto
from helpers.output import without_gloo_lines
from helpers.short_params import some_short
from stretto.errors import ConfigError, DataError, LostPeerError

NO_CLOUDPICKLE = "import sys; sys.modules['cloudpickle'] = None\n"


def rank() -> int:
    return int(os.environ["RANK"])


def describe(text: str, number: float) -> tuple[int, str, float, str]:
    print(f"rank {rank()} prints {text}")
    print(f"rank {rank()} warns", file=sys.stderr)
    return rank(), text, number, os.environ["WORLD_SIZE"]


def test_each_rank_gives_its_result_and_its_output_appears_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert stretto.spawn(describe, "Ü", 0.5, ranks=3) == [(index, "Ü", 0.5, "3") for index in range(3)]
    printed = capsys.readouterr()
    assert sorted(printed.out.splitlines()) == [f"rank {index} prints Ü" for index in range(3)]
    assert sorted(printed.err.splitlines()) == [f"rank {index} warns" for index in range(3)]


def test_functions_and_results_may_be_defined_anywhere_with_cloudpickle() -> None:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

    points = stretto.spawn(lambda point: Point(point.x + rank()), Point(5))
    assert [point.x for point in points] == [5, 6] and isinstance(points[0], Point)
    assert stretto.spawn(partial(divmod, 7), 4, ranks=1) == [(1, 3)]


class PickyError(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__("two arguments")


def fail_on(failing_rank: int, error: BaseException | None) -> None:
    if rank() == failing_rank:
        raise PickyError(1, 2) if error is None else error
    time.sleep(60)


@pytest.mark.long
@pytest.mark.parametrize("failing_rank", some_short([1, 0]))
def test_the_first_error_is_raised_with_its_rank_and_the_others_end(failing_rank: int) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match="no such value") as caught:
        stretto.spawn(fail_on, failing_rank, ValueError("no such value"))
    notes = "\n".join(caught.value.__notes__)
    assert "in fail_on" in notes and f"the error of rank {failing_rank}" in notes
    assert time.monotonic() - started < 30


def test_a_users_mistake_is_raised_as_it_is_without_a_traceback() -> None:
    with pytest.raises(DataError) as caught:
        stretto.spawn(fail_on, 1, DataError("bad data; fix it"))
    assert str(caught.value) == "bad data; fix it"
    assert "Traceback" not in "\n".join(caught.value.__notes__)


def test_errors_and_results_that_can_not_be_sent_are_reported() -> None:
    with pytest.raises(RuntimeError, match="PickyError: two arguments"):
        stretto.spawn(fail_on, 0, None)
    with pytest.raises(ConfigError, match=r"returned an object of type .*, which can't be sent back"):
        stretto.spawn(threading.Lock, ranks=1)
    with pytest.raises(ConfigError, match=r"or its arguments can't be sent to the ranks .*; pass numbers"):
        stretto.spawn(describe, threading.Lock())


def exit_on_rank_1(code: int) -> None:
    if rank():
        sys.exit(code)
    time.sleep(60)


def kill_last_rank() -> None:
    if rank():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(LostPeerError, match="rank 1 was killed by SIGKILL"):
        stretto.spawn(kill_last_rank)


@pytest.mark.long
@pytest.mark.parametrize("code", some_short([0, 3]))
def test_a_rank_that_exits_is_an_error_whatever_its_code(code: int) -> None:
    with pytest.raises(stretto.StrettoError, match=rf"called sys\.exit\({code}\); let it return instead"):
        stretto.spawn(exit_on_rank_1, code)
    with pytest.raises(stretto.StrettoError, match=f"rank 0 has exited with code {code}; let the function return"):
        stretto.spawn(os._exit, code, ranks=1)


def test_ranks_import_from_where_this_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def answer(): return 42\n")
    path: list[object] = [Path("ignored"), *sys.path, str(tmp_path)]
    monkeypatch.setattr(sys, "path", path)
    only_here = importlib.import_module("only_here")
    assert stretto.spawn(only_here.answer, ranks=1) == [42]


def test_wrong_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="object of type list; pass a function"):
        stretto.spawn([])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ranks=0 is not a number of processes"):
        stretto.spawn(rank, ranks=0)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "::1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="called on a rank that is already running"):
        stretto.spawn(rank)


def run_python(arguments: list[str], folder: Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run(command, cwd=folder, input=text, env=environment, capture_output=True, text=True, timeout=120)


SCRIPT = """
import os, stretto

def add(number):
    with stretto.world(device="cpu") as world:
        os.write(1, f"on rank {world.rank}\\n".encode())
        return world.all_reduce([float(world.rank + number)])

CALL
"""


@pytest.mark.long
@pytest.mark.short
def test_a_script_needs_no_guard_with_cloudpickle_and_ranks_join_each_other(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("CALL", "print(stretto.spawn(add, 10))"))
    done = run_python(["script.py"], tmp_path)
    assert sorted(without_gloo_lines(done.stdout).splitlines()) == ["[[21.0], [21.0]]", "on rank 0", "on rank 1"], (
        done.stderr
    )
    assert without_gloo_lines(done.stderr) == "", "with a secret, nothing is to be warned about"


@pytest.mark.parametrize("arguments", [["script.py"], ["-m", "script"]])
def test_a_script_with_a_guard_needs_no_cloudpickle(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        NO_CLOUDPICKLE + "import os, stretto\n"
        "def work(): return int(os.environ['RANK'])\n"
        "if __name__ == '__main__': print(stretto.spawn(work, ranks=3))\n"
    )
    done = run_python(arguments, tmp_path)
    assert done.stdout == "[0, 1, 2]\n", done.stderr


def test_what_needs_cloudpickle_says_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(NO_CLOUDPICKLE + "import stretto\ndef f(): pass\nstretto.spawn(f)\n")
    done = run_python(["script.py"], tmp_path)
    assert "call it under `if __name__ == '__main__':`" in done.stderr and "stretto[notebook]" in done.stderr
    prompt = NO_CLOUDPICKLE + "import stretto\ndef f(): pass\n\nstretto.spawn(f)\n"
    done = run_python(["-"], tmp_path, prompt)
    assert "f is defined in a cell or a prompt" in done.stderr and "stretto[notebook]" in done.stderr
    done = run_python(["-"], tmp_path, NO_CLOUDPICKLE + "import stretto\nstretto.spawn(lambda: 1)\n")
    assert "define it at the top level of a module, or pip install" in done.stderr


def test_a_prompt_works_with_cloudpickle(tmp_path: Path) -> None:
    prompt = "import os, stretto\ndef f(): return os.environ['RANK']\n\nprint(stretto.spawn(f))\n"
    assert run_python(["-"], tmp_path, prompt).stdout == "['0', '1']\n"


@pytest.mark.parametrize("num_signals", [1, 2])
def test_ctrl_c_interrupts_the_ranks_and_a_second_one_kills_them(num_signals: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, signal, time, stretto\n"
        "def work(patience):\n"
        "    try:\n"
        "        os.write(1, f'started {os.getpid()}\\n'.encode())  # at once, as ranks share the pipe\n"
        "        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        os.write(1, b'saving\\n')\n"
        "        time.sleep(patience)\n"
        "        raise\n"
        f"stretto.spawn(work, {0 if num_signals == 1 else 60})\n"
    )
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell may have started the tests with SIGINT ignored, as it does with background jobs.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    if num_signals == 2:
        assert [process.stdout.readline() for _ in range(2)] == ["saving\n"] * 2
        process.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - started < 20
    assert "KeyboardInterrupt" in errors and process.returncode != 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
