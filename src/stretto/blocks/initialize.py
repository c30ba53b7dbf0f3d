"""initialize: draws weights from a seed and each module's name, so that a rank needs to create only its own blocks."""

import copy

import torch
from torch import nn

from stretto.base.errors import ConfigError
from stretto.base.keys import derive_key
from stretto.blocks.block import Block
from stretto.blocks.stack import Stack
from stretto.blocks.ties import restore_ties


def initialize(stack: Stack, seed: int, device: torch.device | str = "cpu", *, model: Stack | None = None) -> Stack:
    """Draw the weights of a stack, or of one stage of it, and move them to `device`; return the stack.

    Each module draws its weights in float32 on the CPU, with a generator seeded by `seed` and the module's name in the
    complete model, such as `blocks.1.cell`. Modules on the meta device are materialized one at a time. A tied weight is
    drawn by the module of its first name; a stage that lacks this module needs the complete `model` for that.
    """
    tied_names = stack.tied_names()
    # Modules are drawn last to first, so a tied weight keeps the values that the module of its first name draws.
    _draw_modules(stack, "", seed)
    restore_ties(stack, tied_names)
    weights = stack.named_weights()
    borrowed = [name for name in weights if not stack.has_block_of(name)]
    for name, drawn in _draw_borrowed(borrowed, stack if model is None else model, seed).items():
        with torch.no_grad():
            weights[name].copy_(drawn)
    return stack.to(device)


def draw_block(model: Stack, index: int, seed: int) -> Block:
    """Return a copy of `model[index]`, on the CPU, with the weights that `initialize` draws."""
    block = copy.deepcopy(model[index])
    _draw_modules(block, f"blocks.{model.first + index}", seed)
    return block


def _draw_borrowed(names: list[str], model: Stack, seed: int) -> dict[str, nn.Parameter]:
    """Draw weights of `model` into copies of their modules."""
    drawn: dict[str, nn.Parameter] = {}
    for module_name in dict.fromkeys(name.rpartition(".")[0] for name in names):
        if not model.has_block_of(f"{module_name}."):
            raise ConfigError(
                f"a weight of this part of a model is tied to one of {module_name}, which is outside it; pass "
                "model=... to initialize, the complete model"
            )
        module = copy.deepcopy(model.get_submodule(module_name))
        _draw_modules(module, module_name, seed)
        drawn |= {f"{module_name}.{name}": parameter for name, parameter in module.named_parameters(recurse=False)}
    return {name: drawn[name] for name in names}


def _draw_modules(root: nn.Module, prefix: str, seed: int) -> None:
    """Draw the weights of a module and all modules in it; `prefix` is its name in the complete model."""
    # Children before parents: `parent.to(...)` also converts the children, which must be off the meta device by then.
    for name, module in reversed([*root.named_modules(prefix=prefix)]):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            raise ConfigError(f"{name} ({type(module).__name__}) has a buffer on the meta device; create it on the CPU")
        if any(True for _ in module.parameters(recurse=False)):
            _draw(module, name, seed)


def _draw(module: nn.Module, name: str, seed: int) -> None:
    # By PyTorch's convention, this method draws a module's initial weights.
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise ConfigError(
            f"{name} ({type(module).__name__}) has weights but no reset_parameters() to draw them with; add that method"
        )
    parameters = [*module.parameters(recurse=False)]
    dtype = parameters[0].dtype
    if any(parameter.is_meta for parameter in parameters):
        try:
            module.to_empty(device="cpu", recurse=False)
        except RuntimeError as error:
            # The CPU's allocator raises a plain RuntimeError, and nothing but the allocation can fail here.
            raise MemoryError(str(error)) from None
    module.to("cpu", torch.float32)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also seed the generators of all devices.
        torch.default_generator.manual_seed(derive_key(seed, "weights", name))
        reset()
    module.to(dtype)
