"""initialize: draws weights from a seed and each module's name, so that a rank needs to create only its own blocks."""

import torch

from stretto.base.errors import ConfigError
from stretto.base.keys import derive_key
from stretto.blocks.stack import Stack


def initialize(stack: Stack, seed: int, device: torch.device | str = "cpu") -> Stack:
    """Draw the weights of a stack, or of one stage of it, and move them to `device`; return the stack.

    Each module draws its weights in float32 on the CPU, with a generator seeded by `seed` and the module's name in the
    complete model, such as `blocks.1.cell`. Modules on the meta device are materialized one at a time.
    """
    check_untied(stack)
    # Children before parents: `parent.to(...)` also converts the children, which must be off the meta device by then.
    for name, module in reversed([*stack.named_modules()]):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            raise ConfigError(f"{name} ({type(module).__name__}) has a buffer on the meta device; create it on the CPU")
        parameters = [*module.parameters(recurse=False)]
        if not parameters:
            continue
        # By PyTorch's convention, this method draws a module's initial weights.
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            raise ConfigError(
                f"{name} ({type(module).__name__}) has weights but no reset_parameters() to draw them with; "
                "add that method"
            )
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
    return stack.to(device)


def check_untied(stack: Stack) -> None:
    """Raise if two names of the stack are the same parameter."""
    names: dict[int, str] = {}
    for name, parameter in stack.named_parameters(remove_duplicate=False):
        first_name = names.setdefault(id(parameter), name)
        if first_name != name:
            raise ConfigError(
                f"{first_name} and {name} are the same parameter; tied weights can't be drawn from a seed or split "
                "into stages, so untie them"
            )
