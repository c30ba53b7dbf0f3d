import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helpers.random_stacks import causal_stacks, draw_inputs, run_stack
from stretto.base import bounded_read
from stretto.base.state import State
from stretto.blocks.bidirectional import Bidirectional
from stretto.blocks.block import Block
from stretto.blocks.initialize import initialize
from stretto.errors import ConfigError, DataError
from stretto.exchange import export_torch, from_torch, save_weights
from stretto.nn import (
    GRU,
    LSTM,
    BidirectionalLSTM,
    Dropout,
    Embedding,
    FinalStates,
    LayerNorm,
    Linear,
    MaxPool,
    MeanPool,
    Pointwise,
    Residual,
    Stack,
)


@settings(max_examples=30, deadline=None)
@given(stack=causal_stacks(torch.float64), num_steps=st.integers(1, 9))
def test_a_stack_comes_back_from_plain_weights_with_the_same_bits(
    stack: Stack, num_steps: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("plain") / "weights.safetensors"
    export_torch(stack, path)
    x = draw_inputs(stack, num_steps, 3)
    assert torch.equal(run_stack(from_torch(path), x), run_stack(stack, x))


def test_a_plain_lstm_with_the_exported_weights_computes_the_same(tmp_path: Path) -> None:
    stack = initialize(Stack([Embedding(7, 3), LSTM(3, 5), Dropout(0.5), LSTM(5, 5), Linear(5, 2)]).double(), seed=1)
    modules = export_torch(stack, tmp_path / "plain.safetensors")
    assert [*modules] == ["embedding", "lstm", "linear"]
    weights = load_file(tmp_path / "plain.safetensors")
    embedding, lstm, linear = nn.Embedding(7, 3), nn.LSTM(3, 5, num_layers=2), nn.Linear(5, 2)
    for name, module in (("embedding", embedding), ("lstm", lstm), ("linear", linear)):
        module.double().load_state_dict(
            {own.removeprefix(f"{name}."): weight for own, weight in weights.items() if own.startswith(name)}
        )
    x = torch.randint(7, (6, 2))
    assert torch.equal(linear(lstm(embedding(x))[0]), run_stack(stack, x))


def test_layers_that_do_not_fit_into_one_torch_module_get_one_each(tmp_path: Path) -> None:
    stack = Stack(
        [LSTM(3, 4), LSTM(4, 4), Residual(LSTM(4, 4)), LSTM(4, 5), LSTM(5, 5, bias=False), GRU(5, 5), LayerNorm(5)]
    )
    modules = export_torch(stack, tmp_path / "plain.safetensors")
    assert [*modules] == ["lstm.0", "lstm.1", "lstm.2", "lstm.3", "gru", "norm"]
    assert [modules[f"lstm.{index}"]["num_layers"] for index in range(4)] == [2, 1, 1, 1]
    assert "lstm.0.weight_ih_l1" in load_file(tmp_path / "plain.safetensors")


def test_pooling_blocks_come_back_too(tmp_path: Path) -> None:
    blocks = [BidirectionalLSTM(3, 4), MeanPool(8), MaxPool(8), FinalStates(8), Linear(8, 2)]
    stack = initialize(Stack(blocks).double(), seed=1)
    modules = export_torch(stack, tmp_path / "plain.safetensors")
    assert modules["meanpool"] == {"kind": "MeanPool", "num_features": 8}
    x = torch.randn(6, 3, 3, dtype=torch.float64)
    assert torch.equal(run_stack(from_torch(tmp_path / "plain.safetensors"), x), run_stack(stack, x))


MODULES: dict[str, Callable[[], nn.RNNBase]] = {
    "three layers": lambda: nn.LSTM(4, 3, 3),
    "dropout between layers": lambda: nn.LSTM(4, 3, 2, dropout=0.3),
    "projection": lambda: nn.LSTM(4, 5, 2, proj_size=3),
    "no bias": lambda: nn.LSTM(4, 3, bias=False),
    "both directions": lambda: nn.LSTM(4, 3, 2, bidirectional=True),
    "gru": lambda: nn.GRU(4, 3, 2),
    "gru in both directions": lambda: nn.GRU(4, 3, 2, bidirectional=True),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_and_its_state_dict_give_one_block_per_layer_and_the_same_outputs(name: str) -> None:
    module = MODULES[name]().double().eval()
    x = torch.randn(7, 2, 4, dtype=torch.float64)
    for stack in (from_torch(module), from_torch(module.state_dict()), from_torch({"cell": module}, module=module)):
        assert sum(isinstance(block, LSTM | GRU | Bidirectional) for block in stack) == module.num_layers
        assert torch.allclose(run_stack(stack, x), module(x)[0], rtol=0, atol=1e-12)
    assert sum(isinstance(block, Dropout) for block in from_torch(module)) == (name == "dropout between layers")


@pytest.mark.parametrize("name", MODULES)
def test_modules_on_the_meta_device_give_the_same_blocks_with_weights_from_the_seed(name: str) -> None:
    def build() -> Stack:
        layers = nn.Sequential(nn.Linear(2, 4), MODULES[name]())
        return from_torch([nn.Embedding(9, 2), *layers, nn.LayerNorm(6 if "both directions" in name else 3)])

    with torch.device("meta"):
        stack = build()
    assert all(parameter.is_meta for parameter in stack.parameters())
    weights, expected = (initialize(model, seed=1).state_dict() for model in (stack, build()))
    assert [*weights] == [*expected]
    assert all(torch.equal(weight, expected[key]) for key, weight in weights.items())


def plain_model() -> tuple[nn.Sequential, Tensor, Tensor]:
    """Layers with common names, an input, and the output."""
    embedding, lstm, head = nn.Embedding(9, 4).double(), nn.LSTM(4, 6, 2, batch_first=True).double(), nn.Linear(6, 3)
    head = head.double()
    x = torch.randint(9, (5, 2))
    y = head(lstm(embedding(x.T))[0]).transpose(0, 1)
    return nn.Sequential(OrderedDict(embed=embedding, rnn=lstm, drop=nn.Dropout(0.1), head=head)), x, y


def test_a_model_is_imported_from_modules_a_state_dict_and_files(tmp_path: Path) -> None:
    model, x, y = plain_model()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "model.ckpt")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    files = [tmp_path / f"model.{end}" for end in ("pt", "ckpt", "safetensors")]
    stacks = [from_torch(model), from_torch([*model]), from_torch(model.state_dict()), *map(from_torch, files)]
    for stack in stacks:
        assert torch.equal(run_stack(stack, x), y)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_that_share_their_weight_still_do(device: str) -> None:
    with torch.device(device):
        embedding, head = nn.Embedding(9, 4), nn.Linear(4, 9)
    head.weight = embedding.weight
    stack = from_torch([embedding, nn.Sequential(nn.LSTM(4, 4), head)])
    assert stack.tied_names() == {"blocks.2.module.weight": "blocks.0.module.weight"}
    assert stack.get_parameter("blocks.0.module.weight") is not embedding.weight


def test_weights_are_copies(tmp_path: Path) -> None:
    module = nn.LSTM(3, 4)
    stack = from_torch(module)
    module.load_state_dict({name: torch.zeros_like(own) for name, own in module.state_dict().items()})
    assert run_stack(stack, torch.randn(2, 2, 3)).abs().max() > 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4)


class Tagger(nn.Module):
    """Layers in order, with something else before the head, if given."""

    def __init__(self, before_head: Callable[[Tensor], Tensor] | None = None, *, last: bool = False) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(9, 4), nn.LSTM(4, 6, 2, batch_first=True), nn.Linear(6, 3)
        self.before_head, self.last = before_head, last

    def forward(self, x: Tensor) -> Tensor:
        y = self.lstm(self.embedding(x))[0]
        y = y[:, -1] if self.last else y
        result: Tensor = self.head(y if self.before_head is None else self.before_head(y))
        return result

    def layers(self) -> dict[str, nn.Module]:
        return {"embedding": self.embedding, "lstm": self.lstm, "head": self.head}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_dict_of_layers_is_taken_only_if_the_module_computes_the_same(device: str) -> None:
    with torch.device(device):
        plain, last, other = Tagger(), Tagger(last=True), Tagger(torch.relu)
        assert [len(from_torch(module.layers(), module=module)) for module in (plain, last)] == [4, 4]
    with pytest.raises(ConfigError, match="Tagger computes something else than its layers embedding, lstm, head in"):
        from_torch(other.layers(), module=other)
    with pytest.raises(ConfigError, match="don't say what is between them; give from_torch the module"):
        from_torch(plain.layers())
    two_inputs = nn.Bilinear(4, 4, 3, device=device)
    with pytest.raises(ConfigError, match=r"can't call Bilinear with one input .*; train it as it is with stretto.par"):
        from_torch(plain.layers(), module=two_inputs)
    assert {parameter.device.type for parameter in plain.parameters()} == {device}


class Own(Block):
    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        return x, state


def without_weights_of_layer_1(module: nn.LSTM) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in module.state_dict().items() if not name.endswith("_l1")}


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (Net(), "Net is not a module that from_torch supports; give its layers as"),
        (nn.RNN(3, 4), "RNN is not a module that from_torch supports"),
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), r"from_torch does not support 1 \(BatchNorm1d\)"),
        (nn.LSTM(3, 4, proj_size=2, bidirectional=True), "a bidirectional LSTM with a projection"),
        (nn.Embedding(3, 4, max_norm=1.0), "embedding has max_norm=1.0"),
        ([nn.LSTM(3, 4), nn.Linear(5, 2)], "1 takes 5 features, but the layer before it, 0, outputs 4"),
        (nn.RNN(3, 4).state_dict(), r"weight_hh_l0 has shape \[4, 4\], which neither an LSTM nor a GRU has"),
        ({"a.weight_ih_l0": torch.zeros(8, 2)}, "a.weight_hh_l0 is missing"),
        (nn.BatchNorm1d(4).state_dict(), "running_mean is not a weight of a layer that from_torch supports"),
        (
            {"a.weight_ih_l0": torch.zeros(8), "a.weight_hh_l0": torch.zeros(8, 2)},
            r"a.weight_ih_l0 has shape \[8\], which no LSTM or GRU has",
        ),
        ({**nn.LSTM(3, 4, bias=False).state_dict(), "bias_ih_l0": torch.zeros(16)}, "of lstm don't match torch's LSTM"),
        ({**nn.LSTM(3, 4).state_dict(), "bias_ih_l0": torch.zeros(15)}, "don't match torch's LSTM .*size mismatch"),
        (without_weights_of_layer_1(nn.LSTM(3, 4, 3)), "weight_hh_l1 is missing; give all weights"),
        ({"a.bias": torch.zeros(2)}, "a.bias is not a weight of a layer that from_torch supports"),
        ({"conv.weight": torch.zeros(2, 2, 2)}, r"conv.weight has shape \[2, 2, 2\], which no supported layer has"),
    ],
)
def test_unsupported_layers_are_refused_in_one_sentence(
    source: nn.Module | dict[str, Tensor] | list[nn.Module], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        from_torch(source)


def test_a_custom_block_is_not_exported_to_torch(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"block 1 \(Own\) has no equivalent in torch"):
        export_torch(Stack([Linear(2, 2), Own()]), tmp_path / "weights.safetensors")
    export_torch(Stack([Linear(2, 2), Pointwise(nn.GELU())]), tmp_path / "weights.safetensors")
    with pytest.raises(ConfigError, match=r"from_torch does not support gelu \(GELU\)"):
        from_torch(tmp_path / "weights.safetensors")


@pytest.mark.parametrize(
    ("name", "is_table"),
    [
        ("emb", True),
        ("encoder.embed_tokens", True),
        ("wordEmbedding", True),
        ("embeddings.0", True),
        ("token_emb", True),
        ("member", False),
        ("ensemble", False),
        ("embedder.head", False),
    ],
)
def test_a_layer_without_bias_is_an_embedding_if_it_is_named_like_one(name: str, is_table: bool) -> None:
    (block,) = from_torch({f"{name}.weight": torch.zeros(5, 3)})
    assert isinstance(block, Embedding if is_table else Linear)


class Doubled(LSTM):
    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, after = super().forward(x, state)
        return 2 * y, after


class KeepingDropout(Dropout):
    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return 3 * x, state


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return 4 * super().forward(input)


class Backwards(Stack):
    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, after = super().forward(x.flip(0), state)
        return y.flip(0), after


class Same(LSTM):
    """A subclass that changes only the name."""


@pytest.mark.parametrize(
    ("stack", "sentence"),
    [
        (Stack([Linear(2, 3), Doubled(3, 4)]), r"block 1 \(Doubled\) has no equivalent in torch"),
        (Stack([Linear(2, 3), Residual(Doubled(3, 3))]), r"block 1 \(Doubled\) has no equivalent in torch"),
        (Stack([Linear(2, 3), KeepingDropout(0.5)]), r"block 1 \(KeepingDropout\) has no equivalent in torch"),
        (Stack([Pointwise(Scaled(5, 3))]), r"block 0 \(Pointwise\) has no equivalent in torch"),
        (Stack([Linear(2, 3), Backwards([LSTM(3, 3)])]), r"block 1 \(Backwards\) has no equivalent in torch"),
        (Backwards([LSTM(3, 3)]), "the stack's class Backwards has its own forward"),
    ],
)
def test_a_subclass_with_its_own_forward_is_not_exported_as_a_torch_module(
    stack: Stack, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        export_torch(stack, tmp_path / "weights.safetensors")
    assert [*export_torch(Stack([Same(3, 4)]), tmp_path / "same.safetensors")] == ["lstm"]


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


def test_a_file_with_code_in_it_is_refused_and_the_code_not_run(tmp_path: Path) -> None:
    torch.save({"weight": Trap(tmp_path / "mark")}, tmp_path / "model.pt")
    with pytest.raises(DataError, match="is not a file of tensors") as caught:
        from_torch(tmp_path / "model.pt")
    # Torch's own message advises to run the code.
    assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("none.safetensors", None, "does not exist"),
        ("broken.safetensors", b"nothing", "is not a safetensors file, or is damaged"),
        ("broken.pt", b"nothing", "is not a file of tensors"),
        ("notes.txt", b"some text\n", "is not a file of tensors"),
        ("broken.pt", b"", "is not a file of tensors"),
        ("broken.pt", b"\x80\x02)R.", "is not a file of tensors"),
        ("broken.pt", b"\x80\x02h\x05.", "is not a file of tensors"),
    ],
)
def test_a_file_that_can_not_be_read_is_one_sentence(
    name: str, content: bytes | None, sentence: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=sentence):
        from_torch(tmp_path / name)


def test_the_weights_of_a_stack_are_not_imported(tmp_path: Path) -> None:
    save_weights(Stack([LSTM(3, 4)]), tmp_path / "weights.safetensors")
    with pytest.raises(ConfigError, match=r"holds the weights of a stretto stack; use it as model\.weights"):
        from_torch(tmp_path / "weights.safetensors")


def test_a_file_without_a_state_dict_is_one_sentence(tmp_path: Path) -> None:
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(DataError, match="holds a value of type list, not a state dict"):
        from_torch(tmp_path / "list.pt")
    torch.save({"lr": 0.1}, tmp_path / "number.pt")
    with pytest.raises(DataError, match=r"'lr' in .* is not a tensor \(float\)"):
        from_torch(tmp_path / "number.pt")


def test_a_compressed_file_that_expands_to_too_much_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"weight": torch.zeros(1000, 1000)}, tmp_path / "plain.pt")
    from_torch(tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for name in plain.namelist():
            bomb.writestr(name, plain.read(name))
    from_torch(tmp_path / "bomb.pt")  # 4 MB are fine
    monkeypatch.setattr(bounded_read, "_MIN_EXPANDED_BYTES", 1 << 20)
    with pytest.raises(
        DataError, match=r"the content of .*bomb\.pt would take 4,\d+,\d+ bytes, more than the limit of"
    ):
        from_torch(tmp_path / "bomb.pt")


def test_a_number_repeated_to_a_huge_tensor_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1).expand(1 << 20, 1 << 20)}, tmp_path / "model.pt")
    assert (tmp_path / "model.pt").stat().st_size < 10_000
    with pytest.raises(DataError, match=r"the content of .*model\.pt would take 4,398,046,511,104 bytes"):
        from_torch(tmp_path / "model.pt")
