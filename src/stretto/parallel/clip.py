"""clip_grad_norm_: torch's, where ranks keep parameters of their own, or of several meshes."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from stretto.parallel.groups import Group
from stretto.parallel.split import split_modules


def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the norm of all gradients of a module, or of parameters, as torch's function does; return it.

    Use it in place of `torch.nn.utils.clip_grad_norm_` with `Layout(split_weights=True)`: each rank has the gradients
    of its own layers only, so torch's function finds another norm on each. All ranks call this together. Parameters
    may also be sharded by `fully_shard` over several meshes.
    """
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    splits = [(split.group, split.own(module)) for module, split in split_modules.items()]
    groups = {id(each): group for group, own in splits for each in own}
    buckets: dict[tuple[Group | None, DeviceMesh | None], list[Tensor]] = {}
    for each in [given] if isinstance(given, Tensor) else given:
        key = (groups.get(id(each)), each.device_mesh if isinstance(each, DTensor) else None)
        buckets.setdefault(key, []).append(each)
    inside = {*parameters.modules()} if isinstance(parameters, nn.Module) else set()
    # A stage that has none of the parameters of a module's part takes part, too.
    asked = [split.group for module, split in split_modules.items() if {*module.modules()} & inside]
    norms: list[Tensor] = []
    for group in dict.fromkeys([*asked, *(group for group, _ in buckets)]):
        own = [_norm(each, norm_type) for (of, _), each in buckets.items() if of is group]
        if group is not None:
            like = next(each[0] for of, each in splits if of is group)
            total = _total(own, norm_type).to(like.device, torch.promote_types(like.dtype, torch.float32))
            own = [torch.empty_like(total) for _ in group.ranks]
            dist.all_gather(own, total, group.messages(len(own)).group)
        norms += own
    total = _total(norms, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the norm of order {norm_type} of the gradients is {float(total)}, so it can't be clipped")
    for bucket in buckets.values():
        nn.utils.clip_grads_with_norm_(bucket, max_norm, total, foreach)
    return total


def _norm(parameters: Sequence[Tensor], norm_type: float) -> Tensor:
    gradients = [each.grad for each in parameters if each.grad is not None]
    norm = nn.utils.get_total_norm(gradients, norm_type) if gradients else torch.zeros((), device=parameters[0].device)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return norm.to(torch.promote_types(parameters[0].dtype, torch.float32))


def _total(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    total: Tensor = torch.linalg.vector_norm(torch.stack([*norms]) if norms else torch.zeros(1), norm_type)
    return total
