"""ProcessExecutor: runs calls in worker processes of this machine that never outlive the process that started them."""

import os
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


class ProcessExecutor(Executor):
    """One thread per worker process, which starts at the thread's first call. `shutdown` ends all processes at once.

    A `ProcessPoolExecutor` would wait for running calls after an error, and leave its workers behind if it is killed.
    """

    def __init__(self, workers: int) -> None:
        # Starting the resource tracker unblocks the signal, so start it before the signal is blocked.
        resource_tracker.ensure_running()
        # Ctrl-C reaches the whole process group. Workers inherit the signal mask of the thread that starts them, so
        # only this process handles it.
        self._threads = ThreadPoolExecutor(
            workers, initializer=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        )
        self._own = threading.local()  # each thread's connection
        self._processes: list[BaseProcess] = []
        self._start_lock, self._is_shut_down = threading.Lock(), False

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":  # noqa: ANN401
        return self._threads.submit(self._call, function, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait=wait and not cancel_futures, cancel_futures=cancel_futures)
        with self._start_lock:
            self._is_shut_down = True
        for process in self._processes:
            process.terminate()
            process.join()
        self._threads.shutdown()

    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        try:
            connection = getattr(self._own, "connection", None) or self._start_worker()
            self._own.connection = connection
            connection.send((function, args, kwargs))
            result, error = connection.recv()
        except (EOFError, ConnectionError):
            raise BrokenExecutor("a worker process ended early") from None
        if error is not None:
            raise error
        return result

    def _start_worker(self) -> Connection:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        with self._start_lock:
            if self._is_shut_down:
                raise BrokenExecutor("the executor was shut down")
            process.start()
            self._processes.append(process)
        theirs.close()
        return ours


def _work(connection: Connection) -> None:
    """Make each call that arrives; answer with its result, or with the exception that it raised."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    while True:
        try:
            function, args, kwargs = connection.recv()
        except EOFError:
            return  # the parent has closed the connection
        try:
            connection.send((function(*args, **kwargs), None))
        except Exception as error:  # noqa: BLE001 - the parent raises it
            error.add_note(traceback.format_exc())
            connection.send((None, error))


def _exit_with_parent() -> None:
    """Exit when the parent is killed: its workers must not go on, unnoticed."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
