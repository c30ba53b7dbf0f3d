"""Checkpoints in object storage, on a real S3 server: committed by a create-only put, read back anywhere."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from s3fs import S3FileSystem

from helpers.rank_pool import RankPools
from helpers.restoring_ranks import (
    GRID,
    MAX_READ,
    REPLICAS,
    STAGES,
    check_restored,
    restore,
    restore_or_fail,
    save,
)
from helpers.s3_server import S3Server, s3_server
from stretto import CheckpointManager, Run, StepReport, load_model
from stretto.checkpoint import Snapshot, find_checkpoint
from stretto.checkpoint.checkpoint import complete_checkpoint_names
from stretto.checkpoint.manifest import TrainingState
from stretto.checkpoint.shards import TensorShard
from stretto.checkpoint.storage import RemoteStorage
from stretto.config.toml import parse_config
from stretto.data import Corpus
from stretto.errors import DataError, FencedError
from stretto.train.events import EvaluationReport

pytestmark = [pytest.mark.s3, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("server")) as server:
        yield server


def snapshot(step: int) -> Snapshot:
    training_state = TrainingState(step=step, seed=1, optimizer="sgd", epoch=0, pool=0, index=step, progress=0.5)
    return Snapshot(
        training_state, [TensorShard("weights.w", torch.full((50, 40), float(step)))], files={"data_spec.json": b"{}"}
    )


def test_a_name_is_created_once_whoever_is_first(server: S3Server) -> None:
    storage = RemoteStorage("s3://bucket/names", 10)
    won: list[int] = []

    def create(number: int) -> None:
        if storage.create("generations/000000001.json", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert storage.read("generations/000000001.json") == b"%d" % won[0]


def test_checkpoints_are_kept_fenced_and_read_back(server: S3Server) -> None:
    url = "s3://bucket/kept"
    old = CheckpointManager(url, keep=2)
    assert old.start() is None
    for step in (1, 2, 3):
        old.save(snapshot(step), wait=True)
    assert [name.step for name in complete_checkpoint_names(RemoteStorage(url, 10))] == [2, 3]
    with CheckpointManager(url) as new:
        saved = new.start()
        assert saved is not None and saved.manifest.training_state.step == 3
        tensor = torch.zeros(20, 40)
        saved.read([TensorShard("weights.w", tensor, 30, 50)])
        assert tensor.eq(3).all() and saved.read_file("data_spec.json") == b"{}"
        with pytest.raises(FencedError, match="generation 2 of this run has taken over"):
            old.save(snapshot(4), wait=True)
        new.save(snapshot(4), wait=True)
    assert find_checkpoint(url).name == "step-000000004-g2"
    assert find_checkpoint(f"{url}/step-000000003-g1").manifest.training_state.step == 3


def test_damage_is_named(server: S3Server) -> None:
    url = "s3://bucket/damaged"
    with CheckpointManager(url) as checkpoints:
        checkpoints.start()
        checkpoints.save(snapshot(1), wait=True)
    saved = find_checkpoint(url)
    shard = saved.manifest.files[0].name
    filesystem = S3FileSystem()
    path = f"bucket/damaged/{saved.name}/{shard}"
    content = bytearray(filesystem.cat_file(path))
    content[-1] ^= 1
    filesystem.pipe_file(path, bytes(content))
    with pytest.raises(DataError, match=f"{shard} is damaged .checksum mismatch"):
        saved.read([TensorShard("weights.w", torch.zeros(50, 40))])
    filesystem.rm_file(path)
    with pytest.raises(DataError, match=f"{shard} is damaged .it is missing"):
        saved.read([TensorShard("weights.w", torch.zeros(50, 40))])


@pytest.mark.long
def test_a_save_waits_for_a_server_that_is_unreachable(server: S3Server) -> None:
    with CheckpointManager("s3://bucket/away", retry_seconds=60) as checkpoints:
        checkpoints.start()
        checkpoints.save(snapshot(1), wait=True)
        server.stop()
        threading.Timer(4, server.start).start()
        started = time.monotonic()
        checkpoints.save(snapshot(2), wait=True)
        assert time.monotonic() - started > 3
    assert find_checkpoint("s3://bucket/away").manifest.training_state.step == 2


def test_a_run_resumes_from_object_storage_in_an_empty_folder(
    server: S3Server, byte_corpus: Corpus, tmp_path: Path
) -> None:
    def run(folder: str, steps: int) -> list[float]:
        config = parse_config(
            {
                "data": {"train": byte_corpus.location, "valid": byte_corpus.location, "lanes": 8, "window": 20},
                "model": {"hidden": 12},
                "train": {"steps": steps, "schedule": "constant"},
                "run": {"folder": tmp_path / folder},
                "save": {"to": f"s3://bucket/run-{folder[0]}"},
            }
        )
        events = list(Run(config).events())
        held_out = next(event for event in events if isinstance(event, EvaluationReport)).evaluation.loss
        return [*(event.loss for event in events if isinstance(event, StepReport)), held_out]

    whole = run("a", 8)
    # Another machine, with nothing but the URL.
    assert run("b1", 4)[:-1] + run("b2", 8) == whole
    assert load_model("s3://bucket/run-b").evaluate(byte_corpus.location).loss == whole[-1]


def test_ranks_that_restore_get_a_checkpoint_from_the_server_once(
    server: S3Server, pools: RankPools, tmp_path: Path
) -> None:
    filesystem = S3FileSystem()
    filesystem.mkdir("ranks")
    for saver, layouts in ((REPLICAS, (REPLICAS, STAGES)), (GRID, (GRID, REPLICAS))):
        name = "replicas" if saver is REPLICAS else "grid"
        url = f"s3://ranks/{name}"
        pools[4].run(save, url, saver)
        checkpoint = find_checkpoint(url)
        filesystem.get(f"{checkpoint.location}/", f"{tmp_path / name}/", recursive=True)
        for layout in layouts:
            before = server.sent_bytes("ranks")
            held = pools[4].run(restore, url, layout)
            num_bytes = server.sent_bytes("ranks") - before
            assert 0.9 < num_bytes / checkpoint.manifest.num_bytes < MAX_READ
            check_restored(held, tmp_path / name, checkpoint.manifest)


def test_damage_of_an_object_ends_all_ranks_with_the_same_error(server: S3Server, pools: RankPools) -> None:
    url = "s3://bucket/damaged-ranks"
    pools[4].run(save, url, REPLICAS)
    filesystem, path = S3FileSystem(), f"{find_checkpoint(url).location}/rank-00003.safetensors"
    content = filesystem.cat_file(path)
    for damaged, reason in (
        (content[:-1] + bytes([content[-1] ^ 1]), "checksum mismatch"),
        (content[:-5], f"it has {len(content) - 5:,} bytes, not {len(content):,}"),
        (content[:5], f"it has 5 bytes, not {len(content):,}"),
        (None, "it is missing"),
    ):
        filesystem.rm_file(path)
        if damaged is not None:
            filesystem.pipe_file(path, damaged)
        sentence = f"{path} is damaged ({reason}); resume from a different checkpoint, or copy it again"
        assert pools[4].run(restore_or_fail, url, REPLICAS) == [sentence] * 4
