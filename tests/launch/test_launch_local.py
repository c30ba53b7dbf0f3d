"""Starting ranks on this machine, and what is left of it when they have ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from stretto.base.errors import LostPeerError, MeshError
from stretto.launch.local import RanksEndedError, _signal_error, launch_local
from stretto.launch.parent_exit import PREEMPTED_EXIT_CODE
from stretto.mesh.join import check_backend_variable


def test_signal_handlers_and_environment_are_restored_when_the_ranks_have_ended() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    environment = dict(os.environ)
    launch_local(1, ["--version"])
    assert [signal.getsignal(number) for number in numbers] == before
    with pytest.raises(RanksEndedError):
        launch_local(1, ["no-such-command"])
    assert [signal.getsignal(number) for number in numbers] == before and dict(os.environ) == environment


def test_a_signal_after_the_ranks_have_ended_has_the_handler_of_the_command() -> None:
    # As with `layout.auto`, which measures on ranks and then starts those that train.
    code = (
        "import os, time\nfrom stretto.launch.local import launch_local\n"
        "from stretto.train.signals import on_preemption_signal\n"
        "with on_preemption_signal(lambda: os._exit(75)):\n"
        "    launch_local(1, ['--version'])\n    print('ended', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and [process.stdout.readline() for _ in range(2)][1] == "ended\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 75


def test_an_unknown_backend_is_refused_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_BACKEND", "foo")
    expected = r"^STRETTO_BACKEND='foo' is unknown; use strict \(CPU only\), or leave it unset$"
    with pytest.raises(MeshError, match=expected):
        launch_local(2, ["absent"])
    monkeypatch.setenv("STRETTO_BACKEND", "")
    check_backend_variable()  # empty is like unset


@pytest.mark.parametrize(
    ("codes", "exit_code"),
    [
        ([], 75),  # no rank was started yet
        ([PREEMPTED_EXIT_CODE, LostPeerError.exit_code], 75),
        ([PREEMPTED_EXIT_CODE, -signal.SIGTERM], 75),  # one had not begun
        ([PREEMPTED_EXIT_CODE, -signal.SIGKILL], 75),  # one did not save in time
        ([0, 0], 75),  # finished: it may have been only the measuring before a run
        ([PREEMPTED_EXIT_CODE, 2], 143),  # an error to fix, not a reason to start again
    ],
)
def test_a_preempted_launcher_exits_with_75_unless_a_rank_has_failed(codes: Sequence[int], exit_code: int) -> None:
    error = _signal_error(codes, signal.SIGTERM)
    assert isinstance(error, RanksEndedError) and error.exit_code == exit_code


def test_the_command_imports_no_torch_to_handle_signals() -> None:
    code = "import sys, stretto.cli.main, stretto.cli.preemption; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
