import importlib.util
import json
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from helpers.prepared_files import KINDS, content, make_preparation
from stretto.errors import ConfigError, DataError
from stretto.prepare.executors import open_executor
from stretto.prepare.part_runner import LostWorkerError
from stretto.prepare.process_executor import ProcessExecutor


class BackwardExecutor(Executor):
    """Runs calls in the reverse order, when the first result is asked for, and each twice: parts are pure."""

    def __init__(self) -> None:
        self.calls: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":  # noqa: ANN401
        future: Future[Any] = Future()
        self.calls.append((future, lambda: function(*args, **kwargs)))
        if len(self.calls) == 3:
            self.run()
        return future

    def run(self) -> None:
        for future, call in reversed(self.calls):
            call()
            future.set_result(call())
        self.calls.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_any_executor_writes_the_same_bytes(kind: str, tmp_path: Path) -> None:
    preparation = make_preparation(kind, tmp_path)
    preparation.run(tmp_path / "plain")
    with ThreadPoolExecutor(3) as executor:
        for name in ("threads", "again"):  # it is not shut down
            stores = preparation.run(tmp_path / name, executor)
            assert [store.location for store in stores] == [
                str(tmp_path / name / split) for split in ("train", "valid")
            ]
            assert content(tmp_path / name) == content(tmp_path / "plain")


def test_parts_are_pure_functions_that_run_in_any_order_and_more_than_once(tmp_path: Path) -> None:
    preparation = make_preparation("series", tmp_path, 30)
    preparation = type(preparation)("series", preparation.files[:3])  # three parts in each phase
    preparation.run(tmp_path / "plain")
    preparation.run(tmp_path / "backward", BackwardExecutor())
    assert content(tmp_path / "backward") == content(tmp_path / "plain")


def test_processes_of_the_standard_library_write_the_same_bytes(tmp_path: Path) -> None:
    preparation = make_preparation("sequences", tmp_path)
    preparation.run(tmp_path / "plain")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        preparation.run(tmp_path / "processes", executor)
    assert content(tmp_path / "processes") == content(tmp_path / "plain")


def test_an_error_on_an_executor_keeps_the_finished_parts(tmp_path: Path) -> None:
    preparation = make_preparation("series", tmp_path)
    bad, good = preparation.files[-1], preparation.files[-1].read_text()
    bad.write_text(good + "\n1,red,3")
    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(DataError, match=r"4\.csv, row 121: its number of cells is 3"):
            preparation.run(tmp_path / "out", executor)
        assert len(list((tmp_path / "out.partial" / "parts").glob("categories-*"))) == 4
        bad.write_text(good)
        preparation.run(tmp_path / "out", executor)
    preparation.run(tmp_path / "plain")
    assert content(tmp_path / "out") == content(tmp_path / "plain")


def test_a_process_executor_ends_its_workers_and_reports_errors() -> None:
    executor = ProcessExecutor(2)
    try:
        assert executor.submit(pow, 2, 10).result() == 1024
        with pytest.raises(ZeroDivisionError):
            executor.submit(divmod, 1, 0).result()
    finally:
        executor.shutdown(cancel_futures=True)
    assert all(process.exitcode is not None for process in executor._processes)


def test_workers_and_executor_are_one_sentence(tmp_path: Path) -> None:
    preparation = make_preparation("text", tmp_path)
    with ThreadPoolExecutor(1) as executor, pytest.raises(DataError, match="workers=2 has no effect with an executor;"):
        preparation.run(tmp_path / "out", executor, workers=2)


def test_another_cluster_is_one_sentence() -> None:
    for on in ("spark", "dask", "ray:1"):
        with pytest.raises(DataError, match=f"on={on} is not supported; choose from ray"), open_executor(on):
            pass


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_a_missing_extra_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"on=ray needs ray; pip install 'stretto\[ray\]'"), open_executor("ray"):
        pass


def test_a_failure_of_a_cluster_is_an_error_of_ours_with_its_cause(tmp_path: Path) -> None:
    """An exception as Dask has it when a part ends its worker again and again; one of the data stays as it is."""
    killed = type("KilledWorker", (Exception,), {"__module__": "distributed.scheduler"})("tried 4 times")

    class LostExecutor(Executor):
        def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":  # noqa: ANN401
            future: Future[Any] = Future()
            future.set_exception(killed)
            return future

    preparation = make_preparation("series", tmp_path, 10)
    with pytest.raises(LostWorkerError, match=r"failed \(KilledWorker: tried 4 times\); prepare again") as raised:
        preparation.run(tmp_path / "out", LostExecutor())
    assert raised.value.__cause__ is killed


def test_only_some_parts_are_submitted_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.prepare.part_runner._MAX_SUBMITTED", 2)
    most = 0

    class CountingExecutor(ThreadPoolExecutor):
        def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":  # noqa: ANN401
            nonlocal most
            futures.append(super().submit(function, *args, **kwargs))
            most = max(most, sum(not future.done() for future in futures))
            return futures[-1]

    futures: list[Future[Any]] = []
    preparation = make_preparation("series", tmp_path, 10)
    preparation.run(tmp_path / "plain")
    with CountingExecutor(1) as executor:
        preparation.run(tmp_path / "out", executor)
    assert len(futures) == 10 and most <= 2
    assert content(tmp_path / "out") == content(tmp_path / "plain")


def test_a_result_that_names_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    preparation = make_preparation("series", tmp_path)
    good = preparation.files[4].read_text()
    preparation.files[4].write_text(good + "\n1,red,3")
    with pytest.raises(DataError, match="number of cells"):
        preparation.run(tmp_path / "out")
    (result, *_) = (tmp_path / "out.partial" / "parts").glob("categories-*-00000")
    result.write_text(json.dumps({**json.loads(result.read_text()), "files": [{"path": "../0.csv", "num_bytes": 1}]}))
    preparation.files[4].write_text(good)
    with pytest.raises(DataError, match=r"names a file '\.\./0\.csv', which no part writes; delete the folder"):
        preparation.run(tmp_path / "out")
