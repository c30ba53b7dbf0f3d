"""Messages in the store count only if a rank of this run has signed them; without a secret they can only end a run."""

import os
import threading
import time
from datetime import timedelta

import pytest

from helpers.rank_pool import RankPool
from stretto import World
from stretto.errors import DataError, MeshError
from stretto.mesh.c10d import HashStore, PrefixStore, TCPStore
from stretto.mesh.liveness import Failure
from stretto.mesh.rank_store import RankStore
from stretto.mesh.rendezvous import rendezvous
from stretto.mesh.signed_store import SignedStore

SECRET = b"0123456789abcdef"
SOON = timedelta(seconds=10)


def test_only_texts_with_the_signature_of_this_run_launch_and_key_are_read() -> None:
    raw = HashStore()
    run = SignedStore(raw, SECRET).in_scope("run")
    store = run.in_scope("launch")
    store.set("error", "grüße")
    assert store.get("error") == store.clone().get("error") == "grüße"
    signed = raw.get("run/launch/error").decode()

    def read(store: SignedStore, key: str, value: str) -> str | None:
        store.unsigned.set(key, value)
        return store.get(key)

    assert read(store, "error", signed) == "grüße"
    assert read(store, "lost", signed) is None  # another key
    assert read(run.in_scope("later"), "error", signed) is None  # another launch
    assert read(SignedStore(HashStore(), SECRET).in_scope("other").in_scope("launch"), "error", signed) is None
    assert read(store, "error", signed + "!") is None
    assert read(store, "error", "f" * 64 + "grüße") is None
    assert read(store, "error", "") is None
    raw.set("run/launch/error", b"\xff" * 80)  # type: ignore[arg-type]
    assert store.get("error") is None
    assert SignedStore(raw, b"another" * 3).in_scope("run").in_scope("launch").get("error") is None


def test_a_forged_value_does_not_keep_a_rank_from_setting_a_key() -> None:
    store = SignedStore(HashStore(), SECRET)
    store.unsigned.set("error", "forged")
    assert store.set_once("error", "real") and store.get("error") == "real"
    assert store.set_once("error", "real") and not store.set_once("error", "late")
    assert store.get("error") == "real"


def test_a_forged_message_is_an_error_at_once() -> None:
    raw = HashStore()
    raw.set("start", "[1, null]")
    started = time.monotonic()
    with pytest.raises(MeshError, match="start in the ranks' key-value store is not signed with this run's secret"):
        RankStore(SignedStore(raw, SECRET)).wait_for_message("start", 0, timedelta(seconds=60), lambda: None)
    assert time.monotonic() - started < 5


def forge(key: str, value: str) -> None:
    """Write to the launch's store as any process can that knows its address."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
    run_store = PrefixStore("stretto/run", store)
    PrefixStore(run_store.get("launch_id").decode(), run_store).set(key, value)


def read_forged_keys(world: World, texts: dict[str, str]) -> tuple[str, int, str | None] | None:
    """Return what a rank learns from the store, where anyone has written, if it has to ask the store."""
    assert world.liveness is not None
    if world.is_rank_zero:
        for key, text in texts.items():
            forge(key, text)
    world.barrier()
    world.liveness.read_store()
    failure = world.liveness.failure
    world.barrier()
    world.liveness.failure = None  # for the next call
    return None if failure is None else (failure.kind, failure.rank, failure.text)


def publish_over_a_forged_error(world: World) -> tuple[bool, Failure | None]:
    printed: list[bool] = []
    assert world.liveness is not None
    if world.is_rank_zero:
        forge("error", "1\nFencedError\nforged")
        world.publish_error(DataError("shard 7 is damaged"), lambda: printed.append(True))
    return bool(printed), world.liveness.find_failure(asks=False)


@pytest.mark.long
@pytest.mark.short
def test_with_a_secret_forged_keys_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_SECRET", SECRET.decode())
    ranks = RankPool(2)
    try:
        lost = Failure("lost", 1, None).dump()
        assert ranks.run(read_forged_keys, {"error": "0\nDataError\nforged", "failure": lost}) == [None, None]
        failure = Failure("error", 0, "DataError\nshard 7 is damaged")
        assert ranks.run(publish_over_a_forged_error) == [(True, failure), (False, failure)]
    finally:
        ranks.close()


@pytest.mark.long
def test_without_a_secret_messages_can_end_a_run_but_not_break_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRETTO_SECRET", raising=False)
    ranks = RankPool(2)
    try:
        for text in ("not a failure", "9" * 5000, '{"kind": "lost", "rank": "1", "text": null}', "[" * 99_999):
            assert ranks.run(read_forged_keys, {"failure": text}) == [None, None]
        assert ranks.run(read_forged_keys, {"failure": Failure("lost", 1, None).dump()}) == [("lost", 1, None)] * 2
        for error, expected in (("no line break", ""), ("0\nos.system\nforged", "os.system\nforged")):
            assert ranks.run(read_forged_keys, {"error": error}) == [("error", 0, expected)] * 2
    finally:
        ranks.close()


@pytest.mark.parametrize("secrets", [(SECRET, b"another" * 3), (SECRET, None), (None, SECRET)])
def test_ranks_with_different_secrets_do_not_join(secrets: tuple[bytes | None, bytes | None]) -> None:
    store = HashStore()
    errors: dict[int, str] = {}

    def join(rank: int) -> None:
        with pytest.raises(MeshError) as error:
            rendezvous(SignedStore(store, secrets[rank]), rank, 2, SOON)
        errors[rank] = str(error.value)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    message = "rank 0 and rank 1 have different secrets, or only one of them has a secret; set STRETTO_SECRET to"
    assert len(errors) == 2 and all(error.startswith(message) for error in errors.values())
