"""Measured profiles: their content, that all ranks get the same one, and that their memory is what a step keeps."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import stretto.measure.profile
import stretto.measure.rank_speeds
from helpers.rank_pool import RankPools
from helpers.short_params import some_short
from stretto import Layout, TrainConfig, World, make_engine
from stretto.base.position import Position
from stretto.base.tf32 import use_tf32
from stretto.data import Corpus, Lanes
from stretto.engine.precision import Precision
from stretto.errors import PlanError
from stretto.measure import block_kinds
from stretto.measure.block_kinds import measure_kinds, name_kinds
from stretto.measure.profile import measure_profile
from stretto.measure.profile_input import ProfileInput
from stretto.measure.rank_speeds import measure_rank_speeds
from stretto.measure.shapes import block_shapes
from stretto.measure.workload import find_workload
from stretto.nn import LSTM, CrossEntropy, Embedding, Linear, LockedDropout, Stack, initialize
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.hardware import KNOWN_HARDWARE, derive_profile
from stretto.plan.predict import predict
from stretto.plan.profile import CostPoint, Profile, RankSpeed, load_profile, save_profile
from stretto.plan.search import find_plan
from stretto.train.named_optimizer import optimizer_factory

A100 = KNOWN_HARDWARE["A100"]


def model(hidden: int = 32) -> Stack:
    with torch.device("meta"):
        return Stack([Embedding(256, hidden), LSTM(hidden, hidden), LSTM(hidden, hidden), Linear(hidden, 256)])


def tied_model() -> Stack:
    stack = model()
    stack.get_submodule("blocks.3.module").weight = stack.get_parameter("blocks.0.module.weight")
    return stack


def measure(world: World, folder: str) -> Profile:
    data = Lanes(Corpus.open(folder), 8, 16)
    optimizer = optimizer_factory(TrainConfig())
    return measure_profile(model(), CrossEntropy(), data, world=world, optimizer=optimizer, threads=1)


@pytest.fixture(scope="module")
def measured(pools: RankPools, byte_corpus: Corpus) -> list[Profile]:
    profiles: list[Profile] = pools[2].run(measure, str(byte_corpus.store.location))
    return profiles


@pytest.mark.long
@pytest.mark.short
def test_all_ranks_get_the_same_profile_with_each_kind_once(measured: list[Profile]) -> None:
    profile, other = measured
    assert profile == other
    assert profile.blocks == ("embedding", "lstm", "lstm", "linear") == tuple(name_kinds(model()))
    assert set(profile.kinds) == {"embedding", "lstm", "linear"}
    lstm = profile.kinds["lstm"]
    assert lstm.weight_bytes == 4 * (8 * 32 * 32 + 8 * 32)
    assert lstm.output_bytes == 4 * 32 and lstm.state_bytes == 2 * 4 * 32
    assert all(point.forward > 0 and point.backward > 0 and point.saved > 0 for point in lstm.points)
    assert profile.fused_blocks == (2,), "the second LSTM runs in one call with the first"
    assert [(point.rows, point.steps) for point in lstm.fused_points] == [(p.rows, p.steps) for p in lstm.points]
    for alone, fused in zip(lstm.points, lstm.fused_points, strict=True):
        # The faster of both forms counts. What is saved for the backward does not depend on time.
        assert fused.forward <= alone.forward and fused.backward <= alone.backward
        assert fused.saved == pytest.approx(alone.saved, rel=0.3)
    assert profile.communicator_bytes == 0, "gloo's buffers are not on a device"
    assert profile.weight_bytes == 4 * sum(weight.numel() for weight in model().parameters())
    assert profile.optimizer_state_ratio == 2, "the two moments of AdamW"
    assert profile.intra_node is not None and profile.intra_node.bandwidth > 1e6 and profile.inter_node is None
    assert [cost.ranks for cost in profile.all_reduces] == [2] and [speed.ranks for speed in profile.speeds] == [1, 2]


def test_blocks_without_weights_are_measured_with_the_features_of_the_block_before(byte_corpus: Corpus) -> None:
    """Dropout after an embedding of 8 features, and after a layer of 12."""
    with torch.device("meta"):
        blocks = [Embedding(256, 8), LockedDropout(0.1), LSTM(8, 12), LockedDropout(0.1), LSTM(12, 12)]
        stack = Stack([*blocks, LockedDropout(0.1), Linear(12, 256)])
    names = ["embedding", "lockeddropout", "lstm", "lockeddropout-2", "lstm-2", "lockeddropout-3", "linear"]
    assert name_kinds(stack) == names
    profile_input = ProfileInput(
        stack, CrossEntropy(), Lanes(byte_corpus, 4, 8), torch.optim.AdamW, torch.device("cpu")
    )
    costs = dict(measure_kinds(profile_input, 1e9))
    assert [costs[name].output_bytes for name in names[:4]] == [4 * 8, 4 * 8, 4 * 12, 4 * 12]


@pytest.mark.long
@pytest.mark.parametrize("precision", some_short(["bf16", "fp32"]))
def test_copies_of_rnn_weights_are_counted(precision: Precision, byte_corpus: Corpus) -> None:
    windows = Lanes(byte_corpus, 8, 16)
    profile_input = ProfileInput(model(), CrossEntropy(), windows, torch.optim.AdamW, torch.device("cpu"), precision)
    costs = dict(measure_kinds(profile_input, 1e9))
    # bf16 copies, and the sums of their gradients in fp32
    copies = 1.5 * costs["lstm"].weight_bytes if precision == "bf16" else 0
    assert {name: kind.cast_bytes for name, kind in costs.items()} == {
        "embedding": 0,
        "lstm": copies,
        "linear": 0,
        "loss": 0,
    }


@pytest.mark.long
@pytest.mark.short
def test_a_profile_is_read_as_it_was_written(measured: list[Profile], tmp_path: Path) -> None:
    save_profile(measured[0], tmp_path / "deep" / "profile.json")
    assert load_profile(tmp_path / "deep" / "profile.json") == measured[0]
    (tmp_path / "bad.json").write_text('{"device": 1}')
    with pytest.raises(PlanError, match=r"bad\.json is not a valid profile: device"):
        load_profile(tmp_path / "bad.json")
    old = measured[0].model_dump(mode="json") | {"version": 0, "a field that version 3 lacks": 1}
    (tmp_path / "old.json").write_text(json.dumps(old))
    with pytest.raises(PlanError, match="version: 0 is not 10; make it with"):
        load_profile(tmp_path / "old.json")


@pytest.mark.long
@pytest.mark.short
def test_a_measured_profile_gives_a_plan(measured: list[Profile], byte_corpus: Corpus) -> None:
    load = find_workload(Lanes(byte_corpus, 8, 16))
    assert [lengths.tolist() for lengths in load.batches] == [[16] * 8] and load.tokens == 128
    plan = find_plan(measured[0], load, Cluster(2))
    assert plan == find_plan(measured[1], load, Cluster(2))
    assert plan.single_device.seconds > 0 and plan.fits_single_device


@pytest.mark.long
@pytest.mark.short
def test_the_memory_of_live_chunks_is_what_a_step_keeps(measured: list[Profile], byte_corpus: Corpus) -> None:
    """Counted in a real step: the bytes that forwards save before the first backward."""
    data = Lanes(byte_corpus, 8, 16)
    for chunks in (1, 4, 6):
        stack = initialize(model(), 1)
        engine = make_engine(stack, CrossEntropy(), Layout(chunks=chunks))
        weights = {weight.untyped_storage().data_ptr() for weight in stack.parameters()}
        seen: dict[int, int] = {}
        kept: list[Tensor] = []

        def pack(tensor: Tensor, seen: dict[int, int] = seen, kept: list[Tensor] = kept) -> Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            engine.step(data.read(Position()), None, 1)
        held = sum(size for pointer, size in seen.items() if pointer not in weights)
        (stage,) = predict(CostModel(measured[0]), find_workload(data), Layout(chunks=chunks), Cluster(1)).stages
        # The prediction takes all live chunks to be as long as the longest: 6 x 3 steps of a window of 16.
        longest = chunks * -(-16 // chunks) / 16
        assert stage.memory.activations == pytest.approx(held * longest, rel=0.2)


def test_a_machine_that_is_slow_for_a_moment_does_not_end_a_measurement() -> None:
    points = {
        (rows, steps): CostPoint(rows=rows, steps=steps, forward=seconds, backward=seconds, saved=100.0 * rows * steps)
        for rows, steps, seconds in ((1, 1, 0.001), (1, 4, 60.0), (2, 1, 0.002))
    }
    assert not block_kinds._is_too_large(2, 4, points, memory_limit=1e6)
    assert block_kinds._is_too_large(2, 4, points, memory_limit=3000.0)
    slow = {size: point.model_copy(update={"forward": 60.0}) for size, point in points.items()}
    assert block_kinds._is_too_large(2, 4, slow, memory_limit=1e6)


def test_a_model_that_no_rank_can_hold_is_measured_block_by_block(pools: RankPools, byte_corpus: Corpus) -> None:
    profiles: list[Profile] = pools[2].run(measure_without_memory, str(byte_corpus.store.location))
    profile = profiles[0]
    assert profile == profiles[1] and set(profile.kinds) == {"embedding", "lstm", "linear"}
    assert profile.action_overhead == 0, "whole steps were not run"
    lstm = profile.kinds["lstm"]
    # Nor were chunks that would be too large; their costs are extrapolated.
    assert lstm.rows == (1,) and CostModel(profile).chunk_cost(1, 2, 8, 16).forward > 2 * lstm.points[0].forward
    assert [speed.ranks for speed in profile.speeds] == [1, 2] and [cost.ranks for cost in profile.all_reduces] == [2]


def test_ranks_that_share_a_core_share_its_speed(pools: RankPools, byte_corpus: Corpus) -> None:
    speeds: tuple[RankSpeed, ...] = pools[4].run(measure_on_one_core, str(byte_corpus.store.location))[0]
    assert [speed.ranks for speed in speeds] == [1, 2, 4]
    # Together they can't be faster than one. If only the fastest steps counted, they would seem 3 times as fast.
    assert 0.4 < 4 * speeds[-1].contended < 2, "2 instead of 1, because other tests may run on the core"


@pytest.mark.long
def test_a_disturbed_measurement_is_noted_in_the_profile(pools: RankPools, byte_corpus: Corpus) -> None:
    profiles: list[Profile] = pools[2].run(measure_disturbed, str(byte_corpus.store.location))
    assert profiles[0].notes["disturbed"] == "other work probably ran on the machine during the measurement"
    assert profiles[0] == profiles[1]


def measure_on_one_core(world: World, folder: str) -> tuple[RankSpeed, ...]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        data, optimizer = Lanes(Corpus.open(folder), 2, 2), optimizer_factory(TrainConfig())
        profile_input = ProfileInput(model(), CrossEntropy(), data, optimizer, world.device, threads=1)
        return measure_rank_speeds(profile_input, world).speeds
    finally:
        os.sched_setaffinity(0, cores)


def measure_disturbed(world: World, folder: str) -> Profile:
    before = stretto.measure.rank_speeds._MIN_PLAUSIBLE_GAIN
    stretto.measure.rank_speeds._MIN_PLAUSIBLE_GAIN = 1e9
    try:
        return measure(world, folder)
    finally:
        stretto.measure.rank_speeds._MIN_PLAUSIBLE_GAIN = before


def measure_without_memory(world: World, folder: str) -> Profile:
    before = stretto.measure.profile._MEMORY_FRACTION
    stretto.measure.profile._MEMORY_FRACTION = 1e-9
    try:
        return measure(world, folder)
    finally:
        stretto.measure.profile._MEMORY_FRACTION = before


def test_the_fingerprint_changes_with_what_a_profile_depends_on(byte_corpus: Corpus) -> None:
    profile_input = ProfileInput(
        model(), CrossEntropy(), Lanes(byte_corpus, 8, 16), torch.optim.AdamW, torch.device("cpu"), threads=0
    )
    same = [
        replace(profile_input, model=model(), windows=Lanes(byte_corpus, 8, 16), seed=7),
        replace(profile_input, make_optimizer=lambda weights: torch.optim.AdamW(weights, lr=0.5)),
    ]
    assert {profile_input.fingerprint} == {other.fingerprint for other in same}
    others = [
        replace(profile_input, model=model(16)),
        replace(profile_input, windows=Lanes(byte_corpus, 4, 16)),
        replace(profile_input, precision="bf16"),
        replace(profile_input, make_optimizer=torch.optim.SGD),
        replace(profile_input, make_optimizer=lambda weights: torch.optim.SGD(weights, momentum=0.9)),
        replace(profile_input, threads=1),
        replace(profile_input, loss=CrossEntropy(ignore_index=0)),
        replace(profile_input, model=tied_model()),
    ]
    assert len({profile_input.fingerprint, *(other.fingerprint for other in others)}) == 9


def test_a_tied_model_is_measured_and_its_weights_counted_once(byte_corpus: Corpus) -> None:
    world = World(0, 1, torch.device("cpu"))
    stack = tied_model()
    measured = measure_profile(stack, CrossEntropy(), Lanes(byte_corpus, 2, 4), world=world, threads=1)
    assert [tie.blocks for tie in measured.tied] == [(0, 3)]
    assert measured.weight_bytes == sum(weight.nbytes for weight in stack.parameters())
    assert stack.device.type == "meta" and len(stack.tied_names()) == 1, "the model itself is not changed"


def test_only_the_fingerprint_of_an_accelerator_depends_on_tf32(byte_corpus: Corpus) -> None:
    fingerprints = []
    for device in ("cpu", "meta"):
        for is_allowed in (False, True):
            with use_tf32(is_allowed):
                windows = Lanes(byte_corpus, 8, 16)
                profile_input = ProfileInput(model(), CrossEntropy(), windows, torch.optim.AdamW, torch.device(device))
                fingerprints.append(profile_input.fingerprint)
    assert fingerprints[0] == fingerprints[1] and fingerprints[2] != fingerprints[3]


def test_a_profile_is_derived_from_a_data_sheet(byte_corpus: Corpus) -> None:
    shapes = block_shapes(model(), Lanes(byte_corpus, 8, 16))
    lstm = shapes[1]
    assert (lstm.weights, lstm.recurrent, lstm.outputs, lstm.state) == (8 * 32 * 32 + 8 * 32, 4 * 32 * 33, 32, 64)
    assert shapes[0].embedding_weights == 256 * 32 and shapes[0].weights == 0
    derived = derive_profile(A100, shapes, 8, 16)
    assert derived.is_estimated and derived.weight_bytes == 4 * sum(w.numel() for w in model().parameters())
    assert [derived.kinds[name].cast_bytes for name in derived.blocks] == [0, 6 * lstm.weights, 6 * lstm.weights, 0]
    assert all(kind.cast_bytes == 0 for kind in derive_profile(A100, shapes, 8, 16, arithmetic="fp32").kinds.values())
    # Sixteen sequential steps need at least as many kernel launches.
    assert CostModel(derived).chunk_cost(1, 2, 8, 16).forward > 16 * A100.launch_seconds
    assert find_plan(derived, find_workload(Lanes(byte_corpus, 8, 16)), Cluster(16, 2)).chosen.layout.num_ranks == 1
