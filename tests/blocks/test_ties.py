"""Names of tied weights in a stack and in its slices."""

import torch
from torch import nn

from stretto.blocks.ties import load_tensors, restore_ties
from stretto.nn import LSTM, Embedding, Linear, Stack

TABLE, OUTPUT = "blocks.0.module.weight", "blocks.3.module.weight"


def tied_model() -> Stack:
    embedding, output = Embedding(9, 4), Linear(4, 9)
    output.module.weight = embedding.module.weight
    return Stack([embedding, Linear(4, 4), LSTM(4, 4), output, Linear(9, 4)])


def test_a_slice_knows_the_first_name_of_a_weight_outside_it() -> None:
    model = tied_model()
    assert model.tied_names() == {OUTPUT: TABLE}
    assert model[1:3].tied_names() == {}
    for part in (model[2:4], model[1:][1:3], model[3:]):
        assert part.tied_names() == {OUTPUT: TABLE}
        assert part.named_weights()[TABLE] is model.get_parameter(TABLE)
        assert OUTPUT not in part.named_weights() and OUTPUT not in part.named_tensors()
        assert not part.has_block_of(TABLE) and part.has_block_of(OUTPUT)


def test_slices_together_own_each_parameter_once() -> None:
    model = tied_model()
    owned = [parameter for part in (model[:1], model[1:3], model[3:]) for parameter in part.owned_parameters()]
    assert list(map(id, owned)) == list(map(id, model.parameters()))


def test_names_that_are_tied_within_a_slice_to_a_weight_outside_it_are_one_weight() -> None:
    model = tied_model()
    output = Linear(4, 9)
    output.module.weight = model.get_parameter(TABLE)
    last = Stack([*model, output])[3:]
    assert last.tied_names() == {OUTPUT: TABLE, "blocks.5.module.weight": TABLE}
    assert [name for name in last.named_weights() if name.endswith("weight")] == [TABLE, "blocks.4.module.weight"]


def test_ties_are_restored_from_the_parameters_of_a_slice() -> None:
    model = tied_model()
    tied_names = model.tied_names()
    new = nn.Parameter(torch.ones(9, 4))
    model.get_submodule("blocks.3.module").weight = new
    restore_ties(model, tied_names, model[3:])
    assert model.get_parameter(TABLE) is new
    restore_ties(model, tied_names, model[1:2])
    assert model.get_parameter(TABLE) is new, "a slice without this weight changes nothing"


def test_loaded_weights_are_tied() -> None:
    tensors = {name: torch.randn_like(tensor) for name, tensor in tied_model().named_tensors().items()}
    assert TABLE in tensors and OUTPUT not in tensors
    with torch.device("meta"):
        stack = tied_model()
    load_tensors(stack, tensors)
    assert stack.get_parameter(OUTPUT) is stack.get_parameter(TABLE)
    assert torch.equal(stack.state_dict()[OUTPUT], tensors[TABLE])
