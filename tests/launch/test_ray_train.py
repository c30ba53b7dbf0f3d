"""Ray Train, real and on this machine: its workers are ranks, also after one of them was killed."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto import RunConfig
from stretto.data import Corpus

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
STEPS = 40


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.train")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        yield ray
    finally:
        ray.shutdown()


def config(data: str, folder: Path, replicas: int) -> RunConfig:
    fields: dict[str, Any] = {
        "data": {"train": data, "lanes": 4, "window": 16},
        "model": {"hidden": 8},
        "train": {"steps": STEPS},
        "layout": {"replicas": replicas},
        "run": {"folder": folder, "timeout": 60.0},
        "save": {"every": 5},
    }
    return RunConfig.model_validate(fields)


def train(fields: dict[str, Any]) -> None:
    """The loop of a worker, as a user writes it."""
    import stretto

    config = stretto.RunConfig.model_validate(fields["config"], strict=False)
    with stretto.world(config.layout.num_ranks, secret_folder=config.run.folder, device="cpu") as world:
        run = stretto.Run(config, world)
        for event in run.events():
            if fields["victim"] is not None and isinstance(event, stretto.StepReport) and event.step == 12:
                marker = Path(fields["victim"])
                if world.rank == 1 and not marker.exists():
                    time.sleep(1)  # the save of step 10 ends
                    marker.write_text(str(os.getpid()))
                    os.kill(os.getpid(), signal.SIGKILL)


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "step"]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_in_a_torch_trainer_equals_one_rank(
    is_killed: bool,
    ray: Any,  # noqa: ANN401
    byte_corpus: Corpus,
    tmp_path: Path,
) -> None:
    from ray.train import FailureConfig, ScalingConfig
    from ray.train import RunConfig as RayRunConfig
    from ray.train.torch import TorchTrainer

    import stretto

    for _ in stretto.Run(config(byte_corpus.location, tmp_path / "one", 1)).events():
        pass
    fields = config(byte_corpus.location, tmp_path / "two", 2).model_dump(mode="json")
    trainer = TorchTrainer(
        train,
        train_loop_config={"config": fields, "victim": str(tmp_path / "killed") if is_killed else None},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RayRunConfig(storage_path=str(tmp_path / "ray"), failure_config=FailureConfig(max_failures=1)),
    )
    trainer.fit()
    assert (tmp_path / "killed").exists() == is_killed
    rows = [json.loads(line) for line in (tmp_path / "two" / "log.jsonl").read_text().splitlines()]
    starts = [(row["ranks"], row["step"]) for row in rows if row["kind"] == "start"]
    assert starts == [(2, 0), (2, 10)] if is_killed else starts == [(2, 0)]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def join_twice(fields: dict[str, Any]) -> None:
    import stretto

    for number in range(2):
        with stretto.world(secret_folder=fields["folder"], device="cpu") as world:
            (total,) = world.all_reduce([float(world.rank + 1)])
            text = f"{world.rank} {world.size} {world.local_rank} {world.local_size} {total}"
            (Path(fields["folder"]) / f"{number}-{world.rank}").write_text(text)


def test_workers_join_more_than_once(ray: Any, tmp_path: Path) -> None:  # noqa: ANN401
    from ray.train import RunConfig as RayRunConfig
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        join_twice,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=3),
        run_config=RayRunConfig(storage_path=str(tmp_path / "ray")),
    ).fit()
    for number in range(2):
        texts = sorted((tmp_path / f"{number}-{rank}").read_text() for rank in range(3))
        assert texts == ["0 3 0 3 6.0", "1 3 1 3 6.0", "2 3 2 3 6.0"]
