"""The strict backend: NCCL's rules over gloo. It must find what would hang on GPUs, and let everything else pass."""

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from helpers.layout_cases import Case, run_case, run_single_device
from helpers.rank_pool import RankPool, RanksFailedError
from stretto import Layout, World
from stretto.engine.recorder import ActionRecorder
from stretto.mesh import strict
from stretto.mesh.channel import Channel
from stretto.mesh.device_clock import DeviceClock
from stretto.mesh.join import BACKEND_VARIABLE
from stretto.mesh.mesh import Mesh

PIPELINE = Layout(stages=2, chunks=4)


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, strict.STRICT)


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def record_every_step() -> None:
    """Make each engine record its actions, as a run does in its first steps."""
    ActionRecorder.stop = lambda self: []  # type: ignore[method-assign]
    start = ActionRecorder.__init__

    def record(self: ActionRecorder, device: torch.device) -> None:
        start(self, device)
        self.start()

    ActionRecorder.__init__ = record  # type: ignore[method-assign]


def synchronize_around_actions() -> None:
    """Take times as this project once did: after a synchronization of the device."""

    def now(self: DeviceClock) -> float:
        strict.synchronize()
        return time.perf_counter()

    DeviceClock.now = now  # type: ignore[method-assign]


def post_receives_ahead() -> None:
    """Post receives before they are needed, as with gloo."""
    create = Channel.__init__

    def ahead(self: Channel, *arguments: object, **options: bool) -> None:
        create(self, *arguments, **options)  # type: ignore[arg-type]
        self._num_receives_ahead = 2

    Channel.__init__ = ahead  # type: ignore[assignment,method-assign]


def connect_on_first_use() -> None:
    Mesh._connect = lambda *arguments, **options: None  # type: ignore[method-assign]


def run_changed(world: World, changes: list[object], layout: Layout, model: str = "lstm") -> list[float]:
    assert dist.get_backend() == strict.STRICT
    for change in changes:
        change()  # type: ignore[operator]
    return run_case(world, Case(model), layout).losses


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([], marks=pytest.mark.long),
        [record_every_step],
        pytest.param([post_receives_ahead], marks=pytest.mark.long),
        pytest.param([record_every_step, synchronize_around_actions], marks=pytest.mark.long),
    ],
    ids=["plain", "recorded", "ahead", "recorded with synchronizations"],
)
def test_a_pipeline_step_ends(ranks: RankPool, changes: list[object]) -> None:
    ranks.run(run_changed, changes, PIPELINE)


@pytest.mark.parametrize("model", ["lstm", "tied"])
@pytest.mark.parametrize(
    "changes",
    [[], pytest.param([record_every_step, synchronize_around_actions], marks=pytest.mark.long)],
    ids=["plain", "recorded with synchronizations"],
)
def test_a_step_whose_head_is_split_ends(ranks: RankPool, changes: list[object], model: str) -> None:
    layout = Layout(stages=2, micro_batches=3, chunks=2, vocab_parallel=True)
    losses = run_single_device(Case(model)).losses
    assert ranks.run(run_changed, changes, layout, model)[0] == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            [record_every_step, synchronize_around_actions, post_receives_ahead],
            marks=pytest.mark.long,
        ),
        pytest.param([post_receives_ahead, connect_on_first_use], marks=pytest.mark.long),
    ],
    ids=["synchronizations while receives are posted", "receives posted before two ranks are connected"],
)
def test_an_old_deadlock_that_is_put_back_is_found(ranks: RankPool, changes: list[object]) -> None:
    with pytest.raises(RanksFailedError, match="no answer within"):
        ranks.run(run_changed, changes, PIPELINE, seconds=15)


def keep_order(world: World) -> list[float]:
    """Send two messages whose receives are posted the other way round."""
    peer, group = 1 - world.rank, dist.group.WORLD
    assert group is not None
    if world.rank == 0:
        works = [dist.isend(torch.full((1,), value), peer) for value in (1.0, 2.0)]
        return [float(work.wait()) for work in works if work is not None]
    buffers = torch.zeros(2, 1)
    for buffer in reversed(buffers.unbind()):
        work = dist.irecv(buffer, peer)
        assert work is not None
        work.wait()
    return [float(buffer) for buffer in buffers]


@pytest.mark.long
def test_messages_arrive_in_the_order_in_which_they_were_sent(ranks: RankPool) -> None:
    assert ranks.run(keep_order)[1] == [2.0, 1.0]


def send_early(world: World) -> tuple[bool, float]:
    """Return whether polling ever says that a send has ended, and how long it takes; the receive comes after 1 s."""
    world.barrier()
    started, peer = time.monotonic(), 1 - world.rank
    if world.rank == 1:
        dist.send(torch.zeros(1), peer)
        time.sleep(1)
        dist.recv(torch.zeros(1), peer)
        return False, 1.0
    dist.recv(torch.zeros(1), peer)
    work = dist.isend(torch.zeros(1), peer)
    assert work is not None
    is_completed = False
    while time.monotonic() - started < 2:
        is_completed |= work.is_completed()
    work.wait()
    return is_completed, time.monotonic() - started


def test_a_send_ends_with_its_receive_and_only_for_a_host_that_waits(ranks: RankPool) -> None:
    (is_completed, seconds), _ = ranks.run(send_early)
    assert not is_completed
    assert seconds >= 1.0


def test_tags_are_refused(ranks: RankPool) -> None:
    with pytest.raises(RanksFailedError, match="NCCL has no tags"):
        ranks.run(send_with_tag)


def send_with_tag(world: World) -> None:
    dist.isend(torch.zeros(1), 1 - world.rank, tag=3)
