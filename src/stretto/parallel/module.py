"""parallelize: lets the ranks share the work of the recurrent layers inside anybody's module, in place."""

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from stretto.base.errors import ConfigError
from stretto.parallel.fixed import FixedLayouts
from stretto.parallel.layers import Layers
from stretto.parallel.layout import Layout
from stretto.parallel.region import Choice, Region
from stretto.parallel.rnn import TORCH_CLASSES, RnnLayers
from stretto.parallel.split import SplitWeights
from stretto.parallel.stack import Stack, StackLayers
from stretto.parallel.tune import Tuner

_log = logging.getLogger(__name__)
_Module = TypeVar("_Module", bound=nn.Module)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # not the one that is synchronized
_REGION = "_stretto_region"  # the attribute of a parallelized layer


LayoutTable = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""What `layouts` returns: the layouts of each region by number of time steps, as plain values that can be saved."""


def parallelize(
    module: _Module, layout: Layout | LayoutTable | Literal["auto"] = "auto", *, mesh: DeviceMesh | None = None
) -> _Module:
    """Let ranks share the work of each nn.LSTM, nn.GRU and nn.RNN of several layers or two ways in `module`; return it.

    They share each stretto.parallel.Stack, too: its blocks take the place of layers.

    Each rank keeps its own rows, as under DistributedDataParallel, and all weights. In training, the ranks of a group
    hand their rows to each other: each runs its layers over the rows of all of them, chunk by chunk of time. What the
    module computes stays the same. Parameters, their names, and `isinstance` stay, too. Evaluation (`eval()`, or
    without gradients) needs no other rank.

    Call it on all ranks alike, before or after `init_process_group` and DistributedDataParallel. The first training
    call makes the groups of ranks: neighboring ranks on one node, or with `mesh` those along its last dimension.

    By default, each region tries some layouts in the first training steps, and keeps the fastest; that may be none at
    all, which is plain DistributedDataParallel. With a Layout, or with the `layouts` of another run, it does not try.
    """
    if any(isinstance(child, _RegionMixin) for child in module.modules()):
        raise ConfigError("the module was passed to parallelize() before; call it once")
    names = {id(child): name or type(child).__name__ for name, child in module.named_modules()}
    stacks = [child for child in module.modules() if isinstance(child, Stack)]
    inner = {id(each) for stack in stacks for each in stack.modules() if each is not stack}
    children = [child for child in module.modules() if id(child) not in inner]
    shared: dict[nn.Module, Layers] = {}
    for child in (child for child in children if isinstance(child, (*TORCH_CLASSES, Stack))):
        layers = layers_of(child)
        if layers.num_layers > 1 or layers.is_bidirectional:
            shared[child] = layers
        else:
            _log.info("%s stays as it is: it has one layer and one direction", names[id(child)])
    _advise(module, children, names)
    root = weakref.ref(module)
    choice = _choice(layout, {names[id(child)]: layers for child, layers in shared.items()})
    for child, layers in shared.items():
        attach(child, Region(layers, names[id(child)], choice, mesh, lambda: mixing_of(root())))
    _split_weights(module)
    return module


def _split_weights(module: nn.Module) -> None:
    """Drop the parameters of other stages, of all regions whose layouts say so."""
    layouts = {path: [*region.choice.layouts(region).values()] for path, region in regions_of(module).items()}
    split = {path: each for path, each in layouts.items() if any(layout.split_weights for layout in each)}
    is_wrapped = any(isinstance(child, DistributedDataParallel) for child in module.modules())
    for path, each in split.items():
        layers = layers_of(module.get_submodule(path))
        if layers.is_bidirectional:
            raise ConfigError(
                f"layout.split_weights is for stages, but {path} is bidirectional; parallelize the others by themselves"
            )
        if len({(layout.stages, layout.split_weights) for layout in each}) > 1:
            raise ConfigError(f"all layouts of {path} need split_weights and the same stages, since weights don't move")
        own = [owner._parameters.get(name) for places in layers.parameters for owner, name in places]
        if is_wrapped or not dist.is_initialized() or not all(type(parameter) is nn.Parameter for parameter in own):
            raise ConfigError(
                f"layout.split_weights drops parameters of {path}: call parallelize() after init_process_group, before "
                "DistributedDataParallel or fully_shard, and without torch's parametrizations"
            )
    for path, (layout, *_) in split.items():
        layers, region = layers_of(module.get_submodule(path)), regions_of(module)[path]
        group = region.bind()
        assert group is not None
        region.split = SplitWeights(module, path, layers.parameters, layout.split(layers.costs), group)


def _advise(module: nn.Module, children: Sequence[nn.Module], names: Mapping[int, str]) -> None:
    """Say what to write instead of layers that a forward calls one by one, or puts on devices of their own."""
    remedy = "write self.%s = stretto.parallel.Stack(layers), and y, state = self.%s(x) in forward: ranks share a Stack"
    for child in (child for child in children if isinstance(child, nn.ModuleList) and not isinstance(child, Stack)):
        rnns = [each for each in child if isinstance(each, TORCH_CLASSES) and not each.bidirectional]
        if len(rnns) == len(child) > 1 and all(each.num_layers == 1 for each in rnns):
            own = names[id(child)].rpartition(".")[2]
            _log.warning("%s has layers that each rank computes alone; " + remedy, names[id(child)], own, own)
    devices = sorted({str(parameter.device) for parameter in module.parameters()})
    if len(devices) > 1:
        _log.warning(
            "the module is on %s; put it on one device of each rank, and " + remedy, devices, "layers", "layers"
        )


def mixing_of(module: nn.Module | None) -> str:
    """Return the name of the first submodule that mixes the rows of a rank; empty if there is none."""
    for name, child in module.named_modules() if module is not None else ():
        if isinstance(child, _BATCH_NORMS) and (child.training or child.running_mean is None):
            return str(name)
    return ""


def attach(module: nn.Module, region: Region) -> None:
    """Make a layer or a Stack the region's, by its class."""
    module.__dict__[_REGION] = region
    plain = type(module)
    shared_class = next(_REGION_CLASSES[base] for base in plain.__mro__ if base in _REGION_CLASSES)
    # After a class of the user's own: its forward calls the region where it calls torch's.
    bases = (shared_class,) if issubclass(shared_class, plain) else (plain, shared_class)
    module.__class__ = type(f"Region{plain.__name__}", bases, {"__module__": plain.__module__})


def regions_of(module: nn.Module) -> dict[str, Region]:
    """Return the regions in a module by the names of their layers."""
    named = module.named_modules()
    return {name: region for name, child in named if (region := child.__dict__.get(_REGION)) is not None}


def layouts(module: nn.Module) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the layouts of the regions in `module`, by name and number of time steps: each is for so many and more.

    They are plain values. Save them with a checkpoint, and pass them to `parallelize` to have the same layouts again.
    With `layout="auto"`, those that are not decided yet are missing.
    """
    return {
        region.name: {steps: asdict(layout) for steps, layout in sorted(region.choice.layouts(region).items())}
        for region in regions_of(module).values()
    }


def _choice(layout: Layout | LayoutTable | str, layers: Mapping[str, Layers]) -> Choice:
    """Check a layout for these layers."""
    if isinstance(layout, str):
        if layout != "auto":
            raise ConfigError(f'layout={layout!r} is not known; use "auto" or a Layout')
        return Tuner()
    if isinstance(layout, Layout):
        for name, each in layers.items():
            if not each.is_bidirectional:
                layout.check(name, each.num_layers)
        return FixedLayouts(layout)
    if not isinstance(layout, Mapping):
        raise ConfigError(f"layout is a {type(layout).__module__}.{type(layout).__name__}; use stretto.parallel.Layout")
    if {*layout} != {*layers}:
        raise ConfigError(f"layout has {sorted(layout)}, but the regions of this module are {sorted(layers)}")
    table = {name: {int(steps): Layout(**values) for steps, values in layout[name].items()} for name in layers}
    for name, given in table.items():
        for each_layout in given.values():
            each_layout.check(name, layers[name].num_layers)
    return FixedLayouts(table)


class _RegionMixin(nn.Module):
    """Comes right before torch's class, or Stack. A copy or a pickle is of the user's class."""

    @torch.compiler.disable(  # type: ignore[untyped-decorator, no-untyped-call]
        reason="a region sends messages, so torch.compile leaves it out: use fullgraph=False"
    )
    def _share(self, *arguments: Any) -> Any:  # noqa: ANN401 - as the module's
        layers, region = layers_of(self), self.__dict__.get(_REGION)
        is_whole = region is None or region.split is None
        if is_whole and (not self.training or not dist.is_initialized() or dist.get_world_size() == 1):
            return layers.run_alone(None, *arguments)
        if region is None:
            return layers.run_alone(None, *arguments)
        return region(layers, *arguments)

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401
        if (region := self.__dict__.get(_REGION)) is not None:
            region.check_copy()
        state = dict(self.__getstate__())  # type: ignore[no-untyped-call]
        state.pop(_REGION, None)
        return object.__new__, (_plain_class(type(self)),), state


class _RegionRnn(_RegionMixin):
    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: ANN401 - as nn.LSTM's
        return self._share(input, hx)


class RegionStack(_RegionMixin, Stack):
    """A Stack that is a region."""

    def _compute(self, *arguments: Any) -> Any:  # noqa: ANN401
        return self._share(*arguments)


_REGION_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    Stack: RegionStack,
    **{plain: type(f"Region{plain.__name__}", (_RegionRnn, plain), {}) for plain in TORCH_CLASSES},
}


def layers_of(module: nn.Module) -> Layers:
    """Return the layers of a module that can be a region."""
    if isinstance(module, Stack):
        return StackLayers(module)
    assert isinstance(module, nn.RNNBase)
    return RnnLayers(module)


def _plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a parallelized layer had before."""
    bases = (base for base in cls.__mro__ if issubclass(base, nn.Module) and not issubclass(base, _RegionMixin))
    return next(bases)
