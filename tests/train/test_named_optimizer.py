"""The optimizers of torch.optim that a config can name, their options, and groups of parameters."""

import pytest
import torch
from torch import nn

from helpers.rank_pool import RankPools, RanksFailedError
from stretto import Layout, TrainConfig, Trainer, World, make_engine
from stretto.data import Corpus, Lanes
from stretto.errors import ConfigError
from stretto.nn import LSTM, CrossEntropy, Embedding, Linear, Stack
from stretto.train.named_optimizer import optimizer_factory

NAMES = ["adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "nadam", "radam", "rmsprop", "rprop", "sgd"]
BIASES, EMBEDDING = "*.bias*", "blocks.0.*"


def model() -> Stack:
    return Stack([Embedding(256, 8), LSTM(8, 8), Linear(8, 256)])


@pytest.mark.parametrize("name", [*NAMES, "RAdam", "AdamW"])
def test_the_named_optimizer_updates_weights_as_torch_does(name: str) -> None:
    weight, expected = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    kind = next(value for key, value in vars(torch.optim).items() if key.lower() == name.lower())
    decay = {} if kind is torch.optim.Rprop else {"weight_decay": 0.1}
    config = TrainConfig.model_validate({"optimizer": name, "lr": 0.1, **decay})
    optimizers = optimizer_factory(config)([weight]), kind([expected], lr=0.1, **decay)
    assert type(optimizers[0]) is kind
    for _ in range(3):
        for parameter, optimizer in zip((weight, expected), optimizers, strict=True):
            parameter.grad = torch.linspace(-1, 1, 6).view(3, 2)
            optimizer.step()
    torch.testing.assert_close(weight, expected)
    assert not torch.equal(weight, torch.ones(3, 2))


@pytest.mark.parametrize(
    ("values", "setting"),
    [
        ({"optimizer": "sgd", "options": {"momentum": 0.7}}, ("momentum", 0.7)),
        ({"optimizer": "sgd", "weight_decay": 0.2}, ("weight_decay", 0.2)),
        ({"optimizer": "rprop", "options": {"etas": [0.4, 1.1]}}, ("etas", (0.4, 1.1))),
        ({"options": {"betas": [0.8, 0.95]}}, ("betas", (0.8, 0.95))),
        ({}, ("fused", True)),
        ({"options": {"fused": False}}, ("fused", False)),
        ({"options": {"foreach": True}}, ("fused", None)),
    ],
)
def test_the_config_sets_the_options_of_an_optimizer(values: dict[str, object], setting: tuple[str, object]) -> None:
    optimizer = optimizer_factory(TrainConfig.model_validate(values))([nn.Parameter(torch.ones(3))])
    assert optimizer.param_groups[0][setting[0]] == setting[1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"optimizer": "lbfgs"},
            "train.optimizer='lbfgs' can't be used: it computes the loss several times per step",
        ),
        (
            {"optimizer": "asgd"},
            "train.optimizer='asgd' can't be used: it has .* of its own; use sgd with train.average='swa'",
        ),
        (
            {"optimizer": "sparseadam"},
            "train.optimizer='sparseadam' can't be used: it needs sparse gradients.*; use adam$",
        ),
        ({"optimizer": "muon"}, "train.optimizer='muon' can't be used: it updates matrices only"),
        ({"optimizer": "adamm"}, "train.optimizer='adamm' is not a class of torch.optim; choose from adadelta, ada"),
        (
            {"options": {"momentum": 0.9}},
            "train.options: momentum is not an option of AdamW; choose from amsgrad",
        ),
        ({"options": {"lr": 0.9}}, "train.options: lr is not an option of AdamW; set train.lr instead"),
        (
            {"options": {"betas": [0.9, 0.99, 0.5]}},
            r"train.options: betas=\[0.9, 0.99, 0.5\] has 3 values, but AdamW takes 2; use values such as",
        ),
        ({"options": {"betas": [0.9]}}, r"train.options: betas=\[0.9\] has 1 values, but AdamW takes 2"),
        ({"options": {"betas": 0.9}}, r"train.options don't fit AdamW \(.*\); correct them"),
        ({"options": {"betas": [2, 0.9]}}, r"train.options don't fit AdamW \(Invalid beta parameter at index 0: 2\)"),
        (
            {"optimizer": "rprop", "weight_decay": 0.1},
            "train.weight_decay=0.1 has no effect: Rprop has none",
        ),
        ({"groups": [{"match": "*", "options": {"x": 1}}]}, r"train.groups\[0\].options: x is not an option of AdamW"),
        (
            {"groups": [{"match": "*", "options": {"eps": -1}}]},
            r"train.groups\[0\].options don't fit AdamW",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        optimizer_factory(TrainConfig.model_validate(values))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.ASGD])
def test_a_factory_of_an_unusable_optimizer_is_refused(kind: type[torch.optim.Optimizer], byte_corpus: Corpus) -> None:
    engine = make_engine(model(), CrossEntropy(), seed=1)
    with pytest.raises(ConfigError, match=f"optimizer={kind.__name__} can't be used"):
        Trainer(engine, Lanes(byte_corpus, 4, 10), TrainConfig(steps=2), optimizer=kind)


def group_rates(world: World, location: str, matches: list[str]) -> tuple[dict[str, float], float]:
    """Take a step with groups of different rates; return the rate by parameter name, and the reported one."""
    groups = [{"match": match, "lr": 10.0 ** -(2 + index)} for index, match in enumerate(matches)]
    config = TrainConfig.model_validate({"steps": 9, "lr": 0.5, "schedule": "constant", "groups": groups, "clip": 0})
    engine = make_engine(model(), CrossEntropy(), Layout(stages=world.size), world, seed=1)
    trainer = Trainer(engine, Lanes(Corpus.open(location), 4, 10), config)
    rate = trainer.advance().learning_rate
    names = {parameter: name for name, parameter in engine.stack.named_parameters()}
    groups_with_rates = [(group["lr"], group["params"]) for group in trainer.optimizer.param_groups]
    return {names[parameter]: lr for lr, parameters in groups_with_rates for parameter in parameters}, rate


def test_the_first_pattern_that_matches_a_name_wins_in_any_layout(pools: RankPools, byte_corpus: Corpus) -> None:
    rates = {}
    for part, reported in pools[2].run(group_rates, byte_corpus.location, [BIASES, EMBEDDING]):
        rates.update(part)
        assert reported == 0.5, "the reported rate is that of the parameters without a group, also where there are none"
    assert rates == group_rates(World(0, 1, torch.device("cpu")), byte_corpus.location, [BIASES, EMBEDDING])[0]
    assert {name: rate for name, rate in rates.items() if rate != 0.5} == {
        **{name: 0.01 for name in rates if "bias" in name},
        **{name: 0.001 for name in rates if name.startswith("blocks.0.")},
    }
    assert 0.5 in rates.values() and 0.01 in rates.values() and 0.001 in rates.values()


def test_a_pattern_that_matches_nothing_on_any_rank_is_refused(pools: RankPools, byte_corpus: Corpus) -> None:
    with pytest.raises(RanksFailedError) as caught:
        pools[2].run(group_rates, byte_corpus.location, [BIASES, "blocks.1.*.bias*"])
    assert set(caught.value.errors) == {0, 1}
    assert all(
        "train.groups: match='blocks.1.*.bias*' matches no parameter, or only those of earlier groups" in error
        for error in caught.value.errors.values()
    )
