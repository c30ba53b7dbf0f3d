"""Weights by (seed, name): any rank can make just its own blocks and get the numbers all others expect."""

import torch

from stretto.base.errors import ConfigError
from stretto.base.keys import derive_key
from stretto.blocks.stack import Stack


def initialize(stack: Stack, seed: int, device: torch.device | str = "cpu") -> Stack:
    """Draw all weights of a stack, or of one stage of it, and put them on `device`; return the stack.

    Each module draws with a generator seeded by `seed` and the module's absolute name, in float32 on the CPU whatever
    its dtype and device are. Modules on the meta device are materialised one at a time, so a rank never holds more than
    the blocks that are its own.
    """
    _refuse_tied(stack)
    # Children before their parents, since moving a parent moves its children too.
    for name, module in reversed([*stack.named_modules()]):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            raise ConfigError(f"{name} ({type(module).__name__}) has a buffer on the meta device; make it on the cpu")
        own = [*module.parameters(recurse=False)]
        if not own:
            continue
        # Torch's own convention for a module that can draw its weights anew.
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            raise ConfigError(
                f"{name} ({type(module).__name__}) has weights but no reset_parameters(), so they can't be drawn by "
                "seed and name; give it that method"
            )
        dtype = own[0].dtype
        if any(parameter.is_meta for parameter in own):
            module.to_empty(device="cpu", recurse=False)
        module.to("cpu", torch.float32)
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which would reseed every device's generator too.
            torch.default_generator.manual_seed(derive_key(seed, "weights", name))
            reset()
        module.to(dtype)
    return stack.to(device)


def _refuse_tied(stack: Stack) -> None:
    names: dict[int, str] = {}
    for name, parameter in stack.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            raise ConfigError(
                f"{first} and {name} are one parameter; tied weights can't be drawn by name, so untie them"
            )
