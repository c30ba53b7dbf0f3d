"""Executors of other systems: `open_executor` connects to Ray or Dask, which are imported only then."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for_all
from contextlib import contextmanager
from typing import Any

from stretto.base.errors import DataError
from stretto.base.extras import import_optional_dependency
from stretto.base.reason import class_and_reason
from stretto.base.remote import is_remote

_MAX_RETRIES = 10  # of a part whose node was lost


@contextmanager
def open_executor(on: str) -> Iterator[Executor]:
    """Connect to the system that `on` names, for the time of the context.

    `ray` is the Ray cluster of this machine, or a new one if there is none; `ray=HOST:PORT` or `ray://HOST:PORT` is
    another one; `dask=HOST:PORT` is the scheduler of a Dask cluster.
    """
    system, _, address = on.partition("=")
    if system == "ray" or on.startswith("ray://"):
        ray = import_optional_dependency("ray", "ray", f"on={on}")
        with _connected(on, lambda: ray.init(address=on if is_remote(on) else address or None, log_to_driver=False)):
            yield RayExecutor()
    elif system == "dask" and address:
        distributed = import_optional_dependency("distributed", "dask", f"on={on}")
        client: Any
        with _connected(on, lambda: distributed.Client(address)) as client, client.get_executor() as executor:
            yield executor
    else:
        raise DataError(f"on={on} is not supported; choose from ray, ray=HOST:PORT, ray://HOST:PORT, dask=HOST:PORT")


@contextmanager
def _connected(on: str, connect: Callable[[], Any]) -> Iterator[Any]:
    try:
        client = connect()
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"on={on} can't be reached ({class_and_reason(error)}); check the address") from None
    with client:
        yield client


class RayExecutor(Executor):
    """Runs calls as tasks of the Ray cluster that this process is connected to.

    A call whose node is lost is made again on another one, so it must be a pure function.
    """

    def __init__(self, max_retries: int = _MAX_RETRIES) -> None:
        self._ray = import_optional_dependency("ray", "ray", "RayExecutor")
        self._task = self._ray.remote(max_retries=max_retries)(_call)
        self._futures: list[Future[Any]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":  # noqa: ANN401
        reference = self._task.remote(function, args, kwargs)
        future: Future[Any] = Future()
        reference.future().add_done_callback(lambda done: _pass_on(done, future))
        future.add_done_callback(lambda done: self._ray.cancel(reference) if done.cancelled() else None)
        self._futures.append(future)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for future in self._futures:
            if cancel_futures:
                future.cancel()
        if wait:
            wait_for_all(self._futures)
        self._futures.clear()


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Exception | None]:
    """Return the result of a call, or the exception that it raised, which Ray would wrap in one of its own."""
    try:
        return function(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001 - the future raises it
        return None, error


def _pass_on(done: "Future[Any]", future: "Future[Any]") -> None:
    if not future.set_running_or_notify_cancel():
        return
    failure = done.exception()
    result, error = (None, failure) if failure is not None else done.result()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
