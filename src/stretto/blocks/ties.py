"""Keeps tied weights tied: torch gives each name a parameter of its own where it creates new ones."""

from collections.abc import Mapping

from torch import Tensor, nn

from stretto.blocks.stack import Stack


def restore_ties(stack: Stack, tied_names: Mapping[str, str], part: Stack | None = None) -> None:
    """Make weights the same parameter again; `tied_names` is what `stack.tied_names()` returned when they were.

    If only a slice of the stack has new parameters, pass it as `part`: its parameters are used.
    """
    part = part or stack
    parameters: dict[str, nn.Parameter] = {}  # by first name
    for name, first_name in tied_names.items():
        own_name = next(filter(part.has_block_of, (first_name, name)), None)
        if own_name is not None and first_name not in parameters:
            parameters[first_name] = stack.get_parameter(own_name)
    for name, first_name in [*tied_names.items(), *((name, name) for name in tied_names.values())]:
        if first_name in parameters and stack.has_block_of(name):
            module_name, _, attribute = name.rpartition(".")
            setattr(stack.get_submodule(module_name), attribute, parameters[first_name])


def load_tensors(stack: Stack, tensors: Mapping[str, Tensor]) -> None:
    """Use these tensors as a stack's parameters and buffers, by the names of `Stack.named_tensors`.

    The stack can be on the meta device. As torch's `load_state_dict` does, raise RuntimeError if they don't fit.
    """
    tied_names = stack.tied_names()
    tied = {name: tensors[first_name] for name, first_name in tied_names.items() if first_name in tensors}
    stack.load_state_dict({**tensors, **tied}, assign=True)
    restore_ties(stack, tied_names)
    stack.is_split = False
