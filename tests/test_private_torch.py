"""The private names of torch that stretto uses: each behind one module, and each still there in the torch installed."""

import ast
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import stretto
from helpers.rank_pool import RankPools
from stretto.base.foreach import add_all, copy_all, interpolate_all, multiply_all
from stretto.base.tf32 import fp32_precisions, use_tf32
from stretto.mesh.world import World

SOURCE = Path(stretto.__file__).parent
C10D_NAMES = (
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "GradBucket",
    "HashStore",
    "PrefixStore",
    "ProcessGroupGloo",
    "ReduceOptions",
    "Store",
    "TCPStore",
    "Work",
)
# Each private name, and the one module that may use it.
PRIVATE_NAMES = {
    "base/foreach.py": {f"torch._foreach_{name}_" for name in ("add", "copy", "lerp", "mul")},
    "base/tf32.py": {f"torch._C{name}" for name in ("", "._get_fp32_precision_getter", "._set_fp32_precision_setter")},
    "blocks/cudnn_weights.py": {"torch._cudnn_rnn_flatten_weight"},
    "engine/ddp_reducer.py": {"ddp.reducer._rebuild_buckets"},
    "launch/elastic_agent.py": {"super()._monitor_workers", "super()._shutdown"},
    "mesh/c10d.py": {
        "torch._C._distributed_c10d",
        "dist.distributed_c10d._abort_process_group",
        *(f"torch._C._distributed_c10d.{name}" for name in C10D_NAMES),
    },
    "parallel/groups.py": {"dist.distributed_c10d._world", "dist.distributed_c10d._world.pg_names"},
    "parallel/tune.py": {"torch._C", "torch._C._current_graph_task_id"},
}


@contextmanager
def private_name(name: str) -> Iterator[None]:
    """Say which private name of torch has changed, and in which version."""
    try:
        yield
    except Exception as error:
        error.add_note(f"torch {torch.__version__} has changed the private name {name}")
        raise


def private_names(source: str) -> set[str]:
    """Return what a source uses of others that begins with one underscore."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return {
        name
        for name in names
        if (name.startswith("torch.") and "._" in name.replace(".__", "."))
        or (
            name.startswith(("super()._", "ddp.reducer._", "dist.distributed_c10d._"))
            and not name.startswith("super().__")
        )
    }


def test_a_private_name_of_torch_is_used_in_one_module_only() -> None:
    used = {str(path.relative_to(SOURCE)): private_names(path.read_text()) for path in SOURCE.rglob("*.py")}
    assert {path: names for path, names in used.items() if names} == PRIVATE_NAMES


def test_foreach_mul_multiplies_in_place() -> None:
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    with private_name("torch._foreach_mul_"):
        multiply_all(tensors, 0.5)
    assert tensors[0].tolist() == [0.5, 0.5] and tensors[1].tolist() == [1.0, 1.0, 1.0]


def test_foreach_copies_convert_and_additions_are_in_place() -> None:
    with private_name("torch._foreach_copy_ or torch._foreach_add_"):
        halves = [torch.zeros(2, dtype=torch.bfloat16)]
        copy_all(halves, [torch.ones(2)])
        sums = [torch.ones(2)]
        add_all(sums, sums)
    assert halves[0].tolist() == [1.0, 1.0] and sums[0].tolist() == [2.0, 2.0]


def test_foreach_lerp_interpolates_in_place() -> None:
    tensors = [torch.zeros(2), torch.ones(1)]
    with private_name("torch._foreach_lerp_"):
        interpolate_all(tensors, [torch.full((2,), 4.0), torch.full((1,), 3.0)], 0.25)
    assert tensors[0].tolist() == [1.0, 1.0] and tensors[1].tolist() == [1.5]


def test_an_rnn_module_runs_with_the_weights_in_its_flat_list() -> None:
    lstm, x = nn.LSTM(2, 2), torch.ones(1, 1, 2)
    with private_name("RNNBase._flat_weights"):
        lstm._flat_weights = [torch.zeros_like(weight) for weight in lstm.parameters()]
    assert not lstm(x)[0].any()


def test_fp32_precision_is_set_for_each_operation_on_cuda() -> None:
    with private_name("torch._C._get_fp32_precision_getter or torch._C._set_fp32_precision_setter"), use_tf32(True):
        assert fp32_precisions() == dict.fromkeys(("matmul", "conv", "rnn"), "tf32")


def test_the_reducer_reduces_a_backward_that_ddp_did_not_start(pools: RankPools) -> None:
    assert pools[2].run(_reduce_by_hand) == [[3.0, 3.0], [3.0, 3.0]]


def _reduce_by_hand(world: World) -> list[float]:
    from stretto.engine.ddp_reducer import prepare_for_backward, rebuild_buckets

    model = nn.Linear(2, 1, bias=False)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    x: Tensor = torch.full((1, 2), 2.0 * (world.rank + 1))
    with private_name("Reducer._rebuild_buckets and Reducer.prepare_for_backward"):
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            rebuild_buckets(ddp)
            prepare_for_backward(ddp)
            # The model itself, not `ddp`, whose forward would prepare the reducer.
            model(x).sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad.flatten().tolist()


def test_the_agent_asks_for_the_workers_state_with_the_method_that_we_extend() -> None:
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    with private_name("LocalElasticAgent._monitor_workers, ._remaining_restarts, ._pcontext or ._shutdown"):
        assert list(inspect.signature(LocalElasticAgent._monitor_workers).parameters) == ["self", "worker_group"]
        loop = inspect.getsource(SimpleElasticAgent._invoke_run)
        # Called in the loop before it asks how many restarts are left.
        assert loop.index("self._monitor_workers(") < loop.index("self._remaining_restarts > 0")
        assert "self._pcontext" in inspect.getsource(LocalElasticAgent)
        # Only the shutdown after a signal names the signal.
        assert inspect.getsource(SimpleElasticAgent.run).count("self._shutdown(e.sigval") == 1
        assert "self._shutdown()" in inspect.getsource(LocalElasticAgent._stop_workers)


def test_torch_distributed_has_the_stores_and_the_bucket() -> None:
    with private_name("torch.distributed.GradBucket, HashStore, PrefixStore, Store or TCPStore"):
        from stretto.mesh.c10d import HashStore, PrefixStore

        PrefixStore("stretto", HashStore()).set("key", "value")
