"""The clock of a host jumps."""

import os
import shutil
import signal
import struct
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from helpers.fault_loss import FaultMeter, LossRecorder
from helpers.train_process import ReferenceRuns, TrainProcess
from stretto.checkpoint.checkpoint import find_checkpoint, read_claims
from stretto.checkpoint.storage import LocalStorage

pytestmark = pytest.mark.faults
GRID = (2, 1)
DAY = 24 * 60 * 60
# Linux has namespaces for its monotonic clock only, and a test must not set the clock of the machine.
SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long long *offset;

__attribute__((constructor)) static void find_offset(void) {
    const char *path = getenv("CLOCK_OFFSET");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(long long), PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) offset = mapped;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (!result && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    int result = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return result;
}

time_t time(time_t *seconds) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (seconds) *seconds = precise.tv_sec;
    return precise.tv_sec;
}
"""


class JumpingClock:
    """A library that shifts the wall clock of processes that load it by an offset, which a test can change."""

    def __init__(self, folder: Path) -> None:
        self._offset = folder / "offset"
        self.jump_to(0)
        library = folder / "clock.so"
        (folder / "clock.c").write_text(SOURCE)
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(folder / "clock.c")], check=True)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(self._offset)}

    def jump_to(self, seconds: int) -> None:
        """Set the difference from the real time."""
        # In place: processes have mapped the file.
        descriptor = os.open(self._offset, os.O_RDWR | os.O_CREAT, 0o600)
        os.pwrite(descriptor, struct.pack("q", seconds), 0)
        os.close(descriptor)


def test_a_clock_that_jumps_changes_neither_the_result_nor_what_the_run_resumes_from(
    reference_runs: ReferenceRuns, faults_data: Path, tmp_path: Path, record_loss: LossRecorder
) -> None:
    if shutil.which("cc") is None:
        assert "CI" not in os.environ
        pytest.skip("needs a C compiler")
    expected = reference_runs[GRID]
    clock = JumpingClock(tmp_path)
    run = TrainProcess(tmp_path / "run", faults_data, GRID, {"save.keep": 100}, clock.environment).start()
    run.await_step(8)
    clock.jump_to(DAY)
    meter = FaultMeter(tmp_path / "run")
    record_loss(meter.await_progress())
    run.await_step(30)
    # All that was saved since then is of tomorrow. The ranks that resume from it are of yesterday.
    clock.jump_to(-DAY)
    meter = FaultMeter(tmp_path / "run")
    record_loss(meter.await_progress())
    assert run.kill(1, signal.SIGKILL)
    code, output = run.finish()
    assert code == 0 and output.count("restarting all ranks") == 1, output
    assert run.final_state() == expected
    claims = read_claims(LocalStorage(tmp_path / "run" / "checkpoints"))
    assert set(claims) == {1, 2} and int(str(claims[2].resumed_from).split("-")[1]) >= 28
    created = datetime.fromisoformat(find_checkpoint(tmp_path / "run").manifest.created)
    assert abs(datetime.now(UTC) - timedelta(days=1) - created) < timedelta(hours=1), "the clock has jumped"
