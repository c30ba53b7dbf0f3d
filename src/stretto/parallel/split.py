"""Split weights: each rank keeps the parameters of its own stage only, with their gradients and optimizer state.

    stage 0  layers 0 1    rank 0  rank 2    Ranks 0 and 2 are replicas: they average the gradients of layers 0 and 1.
    stage 1  layers 2 3    rank 1  rank 3    All else in the module is averaged over all four ranks, by DDP or FSDP2.

A stage's gradients are sums over the rows of all ranks of its group. Divided by the number of stages they are means.
"""

import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from stretto.base.errors import ConfigError
from stretto.parallel.groups import Group
from stretto.parallel.guard import Call

Places = Sequence[tuple[nn.Module, str]]  # of a layer's parameters: the module that has each, and its name there


class SplitWeights:
    """Which parameters of a region each stage has. They have their names in the region's module."""

    def __init__(  # by all ranks together
        self, root: nn.Module, path: str, layers: Sequence[Places], stages: Sequence[range], group: Group
    ) -> None:
        module = root.get_submodule(path)
        self.name, self.group, self.stages, self._root = path or "it", group, stages, weakref.ref(root)
        self._replicas = group.replicas()
        self._averaged: dict[str, weakref.ref[Tensor]] = {}  # parameters of which replicas average the gradients
        self._hooked: set[str] = set()
        self._ready: set[str] = set()  # those whose gradient this backward has computed
        self._alike: set[str] = set()  # parameters of the root that were alike on all ranks
        paths = {child: f"{name}." * bool(name) for name, child in module.named_modules()}
        self.shapes = [{paths[owner] + name: getattr(owner, name).shape for owner, name in layer} for layer in layers]
        by_stage = [[name for layer in stage for name in self.shapes[layer]] for stage in stages]
        self.stage_of = {name: index for index, names in enumerate(by_stage) for name in names}
        if not all(by_stage):
            raise ConfigError(f"layout.split_weights: a stage of {self.name} has no parameters; use fewer stages")
        self.own_names = by_stage[group.rank]
        self._other_names = [name for name, stage in self.stage_of.items() if stage != group.rank]
        owners = dict.fromkeys(owner for layer in layers for owner, _ in layer)
        for owner in (each for each in owners if hasattr(each, "reset_parameters")):
            shapes = [{name: getattr(owner, name).shape for each, name in layer if each is owner} for layer in layers]
            owner.__dict__["reset_parameters"] = partial(_reset, weakref.ref(module), weakref.ref(owner), shapes)
        for owner, name in (each for layer in layers for each in layer):
            own = owner._parameters[name]
            if paths[owner] + name in self._other_names:
                owner._parameters[name] = None
            elif own is not None and own.untyped_storage().nbytes() > own.nbytes:  # cuDNN's buffer of all layers
                own.data = own.data.clone()
        for owner in (each for each in owners if isinstance(each, nn.RNNBase)):
            missing = {name for name, each in owner._parameters.items() if each is None}
            owner._flat_weights_names.sort(key=missing.__contains__)  # torch reads the dtype of the first one
            owner._init_flat_weights()
        module.register_state_dict_pre_hook(partial(_refuse_state_dict, self.name))  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(partial(_leave_out, self._other_names))  # type: ignore[no-untyped-call]
        split_modules[module] = self
        names = [f"{path}.{name}" for name in self.stage_of] + [*self.stage_of] * (not path)  # DDP's, both of a root
        names += getattr(root, "_ddp_params_and_buffers_to_ignore", ())
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(root, names)  # type: ignore[no-untyped-call]

    def own(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of this rank's stage."""
        return [module.get_parameter(name) for name in self.own_names]

    def before_call(self, module: nn.Module, call: Call) -> None:
        """Make replicas alike and let them average their gradients; watch what all ranks have alike."""
        own, root, is_sharded = self.own(module), self._root(), isinstance(module, FSDPModule)
        wrapper = DistributedDataParallel._active_ddp_module  # whose forward this call is in
        if wrapper is not None and {*map(id, own)} & {*map(id, wrapper._module_parameters)}:
            raise ConfigError(
                f"DistributedDataParallel would average the layers of {self.name} over stages; pass to parallelize() "
                "the module that you pass to DistributedDataParallel"
            )
        if isinstance(root, FSDPModule) and not is_sharded:
            raise ConfigError(f'call fully_shard({self.name}, mesh=mesh["replicas"]) before fully_shard of the module')
        self._ready.clear()
        if self._replicas is not None and call.has_grad and not is_sharded:
            for name, parameter in zip(self.own_names, own, strict=True):
                if name not in self._averaged or self._averaged[name]() is not parameter:
                    self._averaged[name] = weakref.ref(parameter)
                    self._hooked.discard(name)
                    dist.broadcast(parameter.detach(), group=self._replicas, group_src=0)
                if parameter.requires_grad and name not in self._hooked:  # one that was frozen may learn later
                    self._hooked.add(name)
                    hook = partial(self._average, name)
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        if root is not None and call.number.bit_count() == 1:  # at calls 1, 2, 4, 8, ...: it reads all weights
            self._watch(root, call)

    def _average(self, name: str, _: Tensor) -> None:
        """Average the gradients of replicas when the last one is ready: their order differs from rank to rank."""
        self._ready.add(name)
        own = [parameter for each in self._averaged.values() if (parameter := each()) is not None]
        own = [parameter for parameter in own if parameter.requires_grad]
        if len(self._ready) == len(own) and self._replicas is not None:
            size, grads = self._replicas.size(), [parameter.grad for parameter in own if parameter.grad is not None]
            for work in [dist.all_reduce(grad.div_(size), group=self._replicas, async_op=True) for grad in grads]:
                work.wait()
            self._ready.clear()

    def _watch(self, root: nn.Module, call: Call) -> None:
        """Raise if parameters that were alike on all ranks at the first call are not any more."""
        split = {id(each) for module, other in split_modules.items() for each in other.own(module)}
        shared = {name: each for name, each in root.named_parameters() if id(each) not in split}
        norms = [float(torch.linalg.vector_norm(each.detach(), dtype=torch.float64)) for each in shared.values()]
        bits = torch.tensor(norms, dtype=torch.float64).view(torch.int64).tolist()
        ranks = self.group.guard.gather(bits, call)
        alike = {name for name, *each in zip(shared, *ranks, strict=True) if len({*each}) == 1}
        if apart := sorted(self._alike - alike):
            raise ConfigError(
                f"ranks had the same weights in {apart[0]}, and have not any more; clip gradients with "
                "stretto.clip_grad_norm_: with split_weights, torch's own function finds another norm on each rank"
            )
        self._alike = alike

    def finish(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return means. If a gradient of one stage is not finite, none of any stage is: GradScaler skips the step."""
        is_bad = torch.stack([~each.isfinite().all() for each in gradients]).any().float()
        dist.all_reduce(is_bad, dist.ReduceOp.MAX, group=self.group.messages(len(self.stages)).group)
        factor = torch.where(is_bad > 0, torch.nan, 1.0)
        return [each * (factor.to(each.dtype) / len(self.stages)) for each in gradients]

    def gather(self, state: Mapping[str, Tensor], prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Give the parameters of all stages, on the CPU of every rank."""
        gloo, stage = self.group.guard.group, self.group.rank
        kinds = [{name: (state[prefix + name].shape, state[prefix + name].dtype) for name in self.own_names}]
        kinds *= len(self.stages)
        dist.all_gather_object(kinds, kinds[0], gloo)
        for name, source in self.stage_of.items():
            shape, dtype = kinds[source][name]
            value = _on_cpu(state[prefix + name]) if source == stage else torch.empty(shape, dtype=dtype)
            dist.broadcast(value.view(-1).view(torch.uint8), group=gloo, group_src=source)
            yield prefix + name, value


split_modules: weakref.WeakKeyDictionary[nn.Module, SplitWeights] = weakref.WeakKeyDictionary()
"""The modules of which each rank keeps its own layers only, in the same order on all ranks."""


def _refuse_state_dict(name: str, *_: Any) -> None:  # noqa: ANN401
    """Let only those ask who put the parts of ranks together: full_state_dict, and DCP if it saves or loads parts."""
    frame = inspect.currentframe()
    while frame := frame and frame.f_back:
        caller = frame.f_globals.get("__name__", "")
        if caller == __name__ or caller.startswith("torch.distributed.checkpoint."):
            if not getattr(frame.f_locals.get("info"), "full_state_dict", False):
                return
            break
    raise ConfigError(
        f"state_dict() would have only this rank's layers of {name}; use stretto.full_state_dict(model), or "
        "get_model_state_dict(model) of torch.distributed.checkpoint.state_dict for dcp.save and dcp.load"
    )


def _leave_out(names: Sequence[str], _module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:  # noqa: ANN401
    for name in names:
        state.pop(prefix + name, None)


def _reset(
    region: "weakref.ref[nn.Module]", reference: "weakref.ref[nn.Module]", layers: Sequence[Mapping[str, torch.Size]]
) -> None:
    """Draw layer after layer of a module, and keep this rank's: the values that the whole module has with this seed."""
    module, whole = reference(), region()
    assert module is not None and whole is not None
    cls: Any = type(module)
    own, like = module._parameters, next(whole.parameters())
    try:
        for shapes in filter(None, layers):
            drawn = {name: nn.Parameter(like.new_empty(shape)) for name, shape in shapes.items()}
            module._parameters = dict(drawn)
            cls.reset_parameters(module)
            for name, each in drawn.items():
                if (kept := own[name]) is not None:
                    kept.detach().copy_(each.detach())
    finally:
        module._parameters = own


def full_state_dict(module: nn.Module, *, only_rank_zero: bool = False) -> dict[str, Any]:
    """Return the whole state dict of a module on the CPU, under your own names: what the plain module loads.

    All ranks call this together. It puts together what each rank keeps of its own (`Layout(split_weights=True)`) and
    what `fully_shard` has sharded, one parameter at a time. With `only_rank_zero`, the other ranks get an empty dict.
    """
    module = module.module if isinstance(module, DistributedDataParallel) else module
    splits = {f"{path}." * bool(path): split_modules.get(child) for path, child in module.named_modules()}
    split_of = {prefix + name: (prefix, split) for prefix, split in splits.items() if split for name in split.stage_of}
    own, whole, is_kept = module.state_dict(), dict[str, Any](), not only_rank_zero or dist.get_rank() == 0
    for key, value in own.items():
        if key not in whole:
            prefix, split = split_of.get(key, ("", None))
            for name, each in [(key, _on_cpu(value))] if split is None else split.gather(own, prefix):
                whole[name] = each if is_kept else None
    return whole if is_kept else {}


def _on_cpu(value: Any) -> Any:  # noqa: ANN401 - a module's own state may be anything
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().to("cpu", copy=True).contiguous() if isinstance(value, Tensor) else value
