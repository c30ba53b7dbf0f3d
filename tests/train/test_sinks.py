"""Sinks: TensorBoard, W&B, MLflow and Prometheus hold what the log holds, read back with their own readers."""

import contextlib
import json
import logging
import math
import resource
import signal
import socket
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers.rank_pool import RankPools
from helpers.short_params import some_short
from helpers.train_process import TrainProcess
from stretto import Run, World, load_config
from stretto.base.extras import install_command
from stretto.cli.main import main
from stretto.data import Corpus
from stretto.errors import ConfigError, DivergedError, PreemptedError
from stretto.launch.rank_environment import free_port
from stretto.train import LoggingConfig, open_sinks
from stretto.train.sinks.sink import iter_scalars
from stretto.train.sinks.state import SinkState
from stretto.train.sinks.tensorboard import TensorBoardSink
from stretto.train.sinks.wandb import find_mode

NUMBERS = st.one_of(st.integers(-(2**40), 2**40), st.floats(), st.booleans(), st.none(), st.text(max_size=3))
STEP = {"step": 1, "loss": 2.0, "num_targets": 30, "data_seconds": 1, "compute_seconds": 3.0, "optimizer_seconds": 1.0}


def read_lines(folder: Path, kind: str) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def read_events(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    return events.Reload()


def scrape(port: int) -> dict[str, dict[str, float]]:
    """The gauges by name, each by rank ('' where there is none)."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {family.name: {one.labels.get("rank", ""): one.value for one in family.samples} for family in families}


def listening(port: int) -> set[str]:
    """The addresses at which someone listens on a port."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {address for address, number in places if int(number, 16) == port}


def wandb_services(pid: int) -> list[str]:
    """The processes that W&B has started for another, which may be gone."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"wandb-core" in (words := path.read_bytes()) and f"--pid\0{pid}\0".encode() in words:
                pids.append(path.parent.name)
    return pids


def await_no_services(pids: list[int], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while any(wandb_services(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(wandb_services(pid) for pid in pids), "W&B's service outlives the run"


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_run_that_was_killed_has_each_step_once_in_all_sinks(
    byte_corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    # Slow to import, and ranks import this module too.
    from mlflow import MlflowClient

    from helpers.wandb_file import read_history

    port, steps = free_port(), 300
    trackers = {"tensorboard": "true", "wandb_project": "lab", "mlflow_experiment": "lab", "prometheus_port": port}
    options: dict[str, object] = {"train.steps": steps, "run.max_restarts": 0}
    options |= {f"logging.{name}": value for name, value in trackers.items()}
    run = TrainProcess(tmp_path / "run", Path(byte_corpus.location), options=options).start()
    run.await_step(60)
    assert run.process is not None
    pids = [run.process.pid]
    assert wandb_services(run.process.pid)
    assert listening(port) == {"0100007F"}, "on loopback only"
    gauges = scrape(port)
    assert gauges["stretto_step"][""] >= 40 and gauges["stretto_targets_per_second"][""] > 0
    run.process.kill()
    assert run.finish()[0] == -signal.SIGKILL
    run.start()
    pids.append(run.process.pid)
    code, said = run.finish()
    assert code == 0 and "resume  after step" in said and "may lack log lines" not in said, said
    assert listening(port) == set()
    await_no_services(pids)

    expected = [(line["step"], line["loss"]) for line in read_lines(run.folder, "step")]
    assert [step for step, _ in expected] == [*range(1, steps + 1)]

    events = read_events(run.folder)
    scalars = events.Scalars("step/loss")
    assert [one.step for one in scalars] == [step for step, _ in expected]
    assert [one.value for one in scalars] == pytest.approx([loss for _, loss in expected], rel=1e-6)
    assert {"save/seconds", "step/targets_per_second"} <= set(events.Tags()["scalars"])
    assert len(list((run.folder / "tensorboard").glob("events.*"))) == 2, "a file for each start"

    (newest,) = max(run.folder.glob("wandb/offline-run-*")).glob("*.wandb")
    rows = read_history(newest)
    assert [(row["_step"], row["step/loss"]) for row in rows if "step/loss" in row] == expected
    assert len({path.name for path in run.folder.glob("wandb/offline-run-*/*.wandb")}) == 1, "one run of W&B"

    client = MlflowClient((run.folder / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("lab")
    assert experiment is not None
    (mlflow_run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(mlflow_run.info.run_id, "step/loss")
    assert sorted((one.step, one.value) for one in history) == expected
    assert mlflow_run.data.params["train.steps"] == str(steps) and mlflow_run.info.status == "FINISHED"


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from("abcde"), NUMBERS), st.lists(NUMBERS, max_size=3))
def test_every_finite_number_of_a_line_is_a_scalar_and_nothing_else(
    values: dict[str, object], of_ranks: list[object]
) -> None:
    def is_number(value: object) -> bool:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]

    scalars = {
        (figure.name, figure.rank): figure.value for figure in iter_scalars("save", {**values, "by rank": of_ranks})
    }
    expected: dict[tuple[str, str | None], object] = {
        (name, None): value for name, value in values.items() if is_number(value)
    }
    if all(map(is_number, of_ranks)):
        expected |= {("by rank", str(rank)): value for rank, value in enumerate(of_ranks)}
    assert scalars == expected


def test_a_step_has_its_speed_and_thousands_of_ranks_have_three_scalars() -> None:
    scalars = {figure.tag: figure.value for figure in iter_scalars("step", STEP)}
    assert scalars["step/seconds"] == 5.0 and scalars["step/targets_per_second"] == 6.0
    assert not any(figure.name == "seconds" for figure in iter_scalars("step", {**STEP, "compute_seconds": None}))
    busy = {figure.tag: figure.value for figure in iter_scalars("ranks", {"busy": [*range(4096)]})}
    assert busy == {"ranks/busy/min": 0.0, "ranks/busy/mean": 2047.5, "ranks/busy/max": 4095.0}


def test_values_per_rank_are_separate_curves_and_labeled_gauges(tmp_path: Path) -> None:
    port = free_port()
    with open_sinks(LoggingConfig(tensorboard=True, prometheus_port=port), tmp_path) as sinks:
        sinks.write("ranks", {"step": 10, "busy": [0.5, 0.25], "name": "no number"})
        sinks.write("evaluation", {"step": 10, "perplexity": 7.0})
        until = time.monotonic() + 10
        while "stretto_evaluation_perplexity" not in (gauges := scrape(port)) and time.monotonic() < until:
            time.sleep(0.01)
    assert gauges["stretto_ranks_busy"] == {"0": 0.5, "1": 0.25}
    assert gauges["stretto_evaluation_perplexity"] == {"": 7.0}
    events = read_events(tmp_path)
    assert set(events.Tags()["scalars"]) == {"ranks/busy/0", "ranks/busy/1", "evaluation/perplexity"}
    assert [(one.step, one.value) for one in events.Scalars("ranks/busy/1")] == [(10, 0.25)]


def test_repeated_steps_are_purged_and_a_new_sink_gets_the_history(tmp_path: Path) -> None:
    lines = [("step", {"step": step, "loss": float(step)}) for step in range(1, 5)]
    for start, stop, first in ((0, 5, 10.0), (2, 5, 20.0)):
        with open_sinks(LoggingConfig(tensorboard=True), tmp_path / "again", step=start) as sinks:
            for step in range(start + 1, stop):
                sinks.write("step", {"step": step, "loss": first + step})
    again = [(one.step, one.value) for one in read_events(tmp_path / "again").Scalars("step/loss")]
    assert again == [(1, 11.0), (2, 12.0), (3, 23.0), (4, 24.0)]
    with open_sinks(LoggingConfig(tensorboard=True), tmp_path / "new", step=4, history=lambda: lines) as sinks:
        sinks.write("step", {"step": 5, "loss": 5.0})
    events = read_events(tmp_path / "new").Scalars("step/loss")
    assert [(one.step, one.value) for one in events] == [(step, float(step)) for step in range(1, 6)]


def test_an_interrupted_history_is_written_again_completely(tmp_path: Path) -> None:
    lines = [("step", {"step": step, "loss": float(step)}) for step in range(1, 5)]
    # A start that was killed while it was still at the history.
    killed = TensorBoardSink(tmp_path / "tensorboard", 4)
    assert killed.needs_history
    for kind, values in lines[:2]:
        killed.write(kind, values)
    for step in (5, 6):
        with open_sinks(LoggingConfig(tensorboard=True), tmp_path, step=step - 1, history=lambda: lines) as sinks:
            sinks.write("step", {"step": step, "loss": float(step)})
    scalars = [(one.step, one.value) for one in read_events(tmp_path).Scalars("step/loss")]
    assert scalars == [(step, float(step)) for step in range(1, 7)]
    assert not TensorBoardSink(tmp_path / "tensorboard", 6).needs_history


def test_a_sink_that_is_not_installed_is_refused_before_anything_is_written(
    byte_corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[data]\ntrain = "{byte_corpus.location}"\n[run]\nfolder = "{tmp_path / "run"}"\n')
    for name, value, package, extra in (
        ("tensorboard", "true", "tensorboard", "tensorboard"),
        ("wandb_project", "lab", "wandb", "wandb"),
        ("mlflow_experiment", "lab", "mlflow", "mlflow"),
        ("prometheus_port", "9", "prometheus_client", "prometheus"),
        ("otlp_endpoint", "auto", "opentelemetry.exporter.otlp.proto.http", "otel"),
    ):
        with monkeypatch.context() as patched:
            # Python's own way of saying that there is no such module.
            patched.setitem(sys.modules, package, None)
            assert main(["train", str(path), f"--logging.{name}", value]) == 2
        said = capsys.readouterr().err.rpartition("not in this folder")[2]  # the config's effects come first
        assert f"needs {package}; {install_command(extra)}, or leave it out" in said.splitlines()[-1]
    assert not (tmp_path / "run").exists()


ENDINGS = [
    (None, "FINISHED", 0),
    (DivergedError("a loss that is not finite"), "FAILED", 1),
    (ValueError("of a block of the user's own"), "FAILED", 1),
    (PreemptedError("as requested"), "KILLED", 1),
    (KeyboardInterrupt(), "KILLED", 1),
]


@pytest.mark.long
@pytest.mark.parametrize(("error", "status", "code"), some_short(ENDINGS, 2))
def test_a_tracker_gets_the_status_of_the_run(
    error: BaseException | None, status: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    from helpers.wandb_file import await_exit_code

    # W&B takes seconds: once for each of its two codes will do.
    has_wandb = error is None or isinstance(error, PreemptedError)
    config = LoggingConfig(mlflow_experiment="lab", wandb_project="lab" if has_wandb else None)
    with pytest.raises(type(error)) if error else contextlib.nullcontext(), open_sinks(config, tmp_path) as sinks:
        sinks.write("step", STEP)
        if error is not None:
            raise error
    client = MlflowClient((tmp_path / "mlflow").as_uri())
    run_id = SinkState(tmp_path).read("mlflow lab")
    assert run_id is not None and client.get_run(run_id).info.status == status
    assert [await_exit_code(file) for file in tmp_path.glob("wandb/offline-run-*/*.wandb")] == [code] * has_wandb


def test_a_port_that_is_taken_is_refused_by_name(byte_corpus: Corpus, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[data]\ntrain = "{byte_corpus.location}"\nlanes = 8\nwindow = 20\n[train]\nsteps = 2\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = {"logging.prometheus_port": str(port), "run.folder": str(tmp_path / "run")}
        with pytest.raises(ConfigError, match=rf"can't listen on logging\.prometheus_port={port} \(Address already in"):
            list(Run(load_config(path, options)).events())
    # What was refused is no hindrance, and a port that was closed a moment ago isn't either.
    for steps in ("2", "3"):
        assert list(Run(load_config(path, {**options, "train.steps": steps})).events())


def test_a_run_waits_for_the_port_of_an_earlier_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as lingering:
        port = lingering.getsockname()[1]
        SinkState(tmp_path).write("prometheus", str(port))
        threading.Timer(0.5, lingering.close).start()
        with open_sinks(LoggingConfig(prometheus_port=port), tmp_path):
            assert listening(port) == {"0100007F"}


def test_a_sink_whose_state_can_not_be_written_leaves_no_server_behind(tmp_path: Path) -> None:
    (tmp_path / "sinks.json").mkdir()
    port = free_port()
    with pytest.raises(ConfigError, match=rf"logging\.prometheus_port={port} can't be opened"):
        open_sinks(LoggingConfig(prometheus_port=port), tmp_path)
    assert listening(port) == set()


def run_watched(world: World, path: Path) -> list[str]:
    """Train; return what threads of ours there were meanwhile."""
    names: set[str] = set()
    for _ in Run(load_config(path, {"layout.replicas": str(world.size)}), world).events():
        names |= {thread.name for thread in threading.enumerate()}
    return sorted(name for name in names if name.startswith("stretto-"))


@pytest.mark.long
def test_only_the_first_rank_has_sinks(byte_corpus: Corpus, tmp_path: Path, pools: RankPools) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        f'[data]\ntrain = "{byte_corpus.location}"\nlanes = 8\nwindow = 20\n[train]\nsteps = 3\n'
        f'[run]\nfolder = "{tmp_path / "run"}"\n[logging]\ntensorboard = true\n'
    )
    assert pools[2].run(run_watched, path) == [["stretto-tensorboard"], []]
    assert [one.step for one in read_events(tmp_path / "run").Scalars("step/loss")] == [1, 2, 3]


def test_a_failing_sink_is_reported_once_and_the_run_continues(
    byte_corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        f'[data]\ntrain = "{byte_corpus.location}"\nlanes = 8\nwindow = 20\n[train]\nsteps = 6\n'
        f'[run]\nfolder = "{tmp_path / "run"}"\n[logging]\ntensorboard = true\n'
    )
    with caplog.at_level(logging.WARNING):
        events = Run(load_config(path)).events()
        next(events)
        for file in (tmp_path / "run" / "tensorboard").iterdir():
            file.unlink()
        list(events)
    assert len(read_lines(tmp_path / "run", "step")) == 6
    (warning,) = [record.getMessage() for record in caplog.records if "logging." in record.getMessage()]
    assert warning.startswith("the tracker of logging.tensorboard may lack log lines (") and "No such file" in warning


def test_a_server_that_can_not_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(
        ConfigError, match=r"logging\.mlflow_experiment=lab can't be opened \(MlflowException: .*or leave it out"
    ):
        open_sinks(LoggingConfig(mlflow_experiment="lab"), tmp_path)


def test_a_full_disk_leaves_no_partial_record(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "tensorboard", 0)
    sink.write("step", {"step": 1, "loss": 1.0})
    (file,) = (tmp_path / "tensorboard").iterdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 20, before[1]))
        with pytest.raises(OSError, match="File too large"):
            sink.write("step", {"step": 2, "loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    sink.write("step", {"step": 3, "loss": 3.0})
    assert [one.step for one in read_events(tmp_path).Scalars("step/loss")] == [1, 3]


def test_wandb_is_offline_only_without_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(file))
    assert find_mode() == "offline"
    file.write_text("machine elsewhere login user password key\n")
    assert find_mode() == "offline"
    file.write_text("machine api.wandb.ai login user password key\n")
    file.chmod(0o600)
    assert find_mode() is None, "W&B decides, so it is online unless `wandb offline` was called"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert find_mode() == "offline"
    monkeypatch.delenv("WANDB_MODE")
    file.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert find_mode() is None
