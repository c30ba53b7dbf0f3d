import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import Layout, RunConfig, TrainConfig, load_config
from stretto.config.toml import dump_config, parse_config
from stretto.errors import ConfigError, DataError

MINIMAL = '[data]\ntrain = "corpus"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_options_override_the_fields_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "lanes = 8\n[train]\nlr = 0.5\n")
    config = load_config(path, {"train.lr": "3e-4", "model.residual": "true", "layout.micro_batches": "2"})
    assert (config.data.lanes, config.train.lr, config.model.residual, config.layout.micro_batches) == (
        8,
        3e-4,
        True,
        2,
    )


@given(
    lr=st.floats(1e-9, 1e3),
    folder=st.text(min_size=1, max_size=20).filter(lambda name: "\0" not in name and not _has_surrogate(name)),
    steps=st.none() | st.integers(1, 10**12),
    norm=st.booleans(),
)
def test_a_config_survives_writing_and_reading(lr: float, folder: str, steps: int | None, norm: bool) -> None:
    tree = {"data": {"train": folder}, "train": {"lr": lr, "steps": steps}, "model": {"norm": norm}}
    config = RunConfig.model_validate(tree)
    assert parse_config(tomllib.loads(dump_config(config))) == config


def test_options_and_groups_survive_a_config_file_and_can_be_overridden(tmp_path: Path) -> None:
    text = """
        [train]
        optimizer = "RAdam"
        options = { betas = [0.8, 0.95], decoupled_weight_decay = true }
        [[train.groups]]
        match = "*.bias*"
        weight_decay = 0.0
        [[train.groups]]
        match = "blocks.0.*"
        lr = 0.1
        options = { eps = 1e-6 }
    """
    config = load_config(write(tmp_path, MINIMAL + text))
    assert config.train.optimizer == "radam" and config.train.options["betas"] == [0.8, 0.95]
    assert [group.match for group in config.train.groups] == ["*.bias*", "blocks.0.*"]
    assert parse_config(tomllib.loads(dump_config(config))) == config
    changed = load_config(
        write(tmp_path, MINIMAL + text),
        {"train.options": "{eps = 1e-3}", "train.groups": '[{match = "*", options = {betas = [0, 0.5]}}]'},
    )
    assert changed.train.options == {"eps": 1e-3} and changed.train.groups[0].options == {"betas": [0, 0.5]}
    assert TrainConfig(options={"betas": (0.8, 0.95)}) == TrainConfig(options={"betas": [0.8, 0.95]})


def _has_surrogate(text: str) -> bool:
    return any(0xD800 <= ord(character) <= 0xDFFF for character in text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", r"\[data\] is missing; add that section, with train set to"),
        ("[data]\n", r"data: train is missing; set it to the folder of the data, or set factory"),
        (MINIMAL + "[train]\nlr = -1\n", r"train\.lr=-1 should be greater than 0$"),
        (MINIMAL + "[train]\nlr = 'fast'\n", r"train\.lr='fast' should be a valid number"),
        (MINIMAL + "[train]\nlr = nan\n", r"train\.lr=nan should be"),
        (MINIMAL + "[train]\nlearning_rate = 1\n", r"train\.learning_rate is not a known field; choose from steps, "),
        (MINIMAL + "[train]\nsteps = true\n", r"train\.steps=True should be a valid integer$"),
        (MINIMAL + "[train]\nsteps = '10'\n", r"train\.steps='10' should be a valid integer$"),
        ("[dta]\ntrain = 'x'\n", r"dta is not a known section; did you mean data\? \(the first of 2 errors\)$"),
        ("lanes = 3\n" + MINIMAL, r"lanes is outside of its section; move it to \[data\]$"),
        (
            MINIMAL + "[save]\nlayout = 'auto'\n",
            r'^.*: save\.layout is not a known field; write `layout = "auto"` above the first',
        ),
        (MINIMAL + "[train]\nwarm = 1\n", r"train\.warm is not a known field; did you mean warmup\?$"),
        (MINIMAL + "[trian]\nlr = 1\n", r"trian is not a known section; did you mean train\?$"),
        (
            MINIMAL + "[model]\ncell = 'rnn'\n",
            r"model\.cell='rnn' should be 'lstm', 'gru', 'mingru', 'minlstm', 'mlstm' or 'slstm'$",
        ),
        (MINIMAL + "[model]\ncell = 'gru'\nprojection = 4\n", r"model: projection=4 needs cell='lstm'"),
        (MINIMAL + "[model]\ncell = 'mingru'\nweight_dropout = 0.5\n", r"weight_dropout=0.5 needs cell='lstm'"),
        (MINIMAL + "[model]\ncell = 'mlstm'\nheads = 3\n", r"hidden=256 is not a multiple of heads=3; change one"),
        (MINIMAL + "[model]\nheads = 8\n", r"heads=8 needs cell='mlstm' or 'slstm', not 'lstm'; leave it out"),
        (MINIMAL + "[model]\ncell = 'slstm'\nbidirectional = true\n", r"bidirectional=true needs cell='lstm' or 'gru'"),
        (
            MINIMAL + "[model]\ntied = true\nembedding = 7\n",
            r"embedding has 7 features and .* layer 256",
        ),
        (MINIMAL + "[model]\nprojection = 256\n", r"projection=256 must be less than hidden=256"),
        (MINIMAL + "[train]\noptions = 3\n", r"train\.options=3 should be a valid dictionary"),
        (MINIMAL + "[train.options]\nbetas = {}\n", r"train\.options: betas=\{\} should be a number, a string, true, "),
        (MINIMAL + "[[train.groups]]\nlr = 1\n", r"train\.groups\.0\.match is missing; set it"),
        (
            MINIMAL + "[[train.groups]]\nmatch = '*'\ndecay = 1\n",
            r"train\.groups\.0\.decay is not a known field; did you mean weight_decay\?$",
        ),
        (MINIMAL + "[train]\nplateau_factor = 0.1\n", r"plateau_factor=0\.1 needs schedule='plateau', not 'cosine'"),
        (
            MINIMAL + "[train]\npatience = 3\n",
            r"train\.patience=3 depends on evaluations during the run",
        ),
        (
            MINIMAL + "lanes = 0\nwindow = 0\n",
            r"data\.lanes=0 should be greater than or equal to 1 \(the first of 2 errors\)$",
        ),
        ("data = 3\n", r"data=3 should be a section; write it as \[data\]$"),
        ("[data\n", r"run\.toml is not valid TOML"),
        ("a = " + "[" * 100_000, r"run\.toml is not valid TOML: it is nested too deeply; correct the file$"),
    ],
)
def test_a_mistake_is_reported_with_field_value_and_remedy(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_config(write(tmp_path, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [("train.lrr", "train.lrr is not a"), ("trian.lr", "trian is not a"), ("lr", "lr is outside of its section")],
)
def test_an_unknown_override_is_named(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, MINIMAL), {name: "3e-4"})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml does not exist"):
        load_config(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="can't be read"):
        load_config(tmp_path)


def test_a_file_that_is_too_large_or_has_a_long_key_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    os.truncate(path, (128 << 10) + 1)
    with pytest.raises(DataError, match=r"run\.toml is larger than 128 KiB, the limit for files of its kind"):
        load_config(path)
    long_key = "a" + ".a" * 60_000
    with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML: a key has more than 64 parts; correct the"):
        load_config(write(tmp_path, f"{MINIMAL}\n{long_key} = 1"))
    with pytest.raises(ConfigError, match=r"--train\.options='\{a\.a"):
        load_config(write(tmp_path, MINIMAL), {"train.options": f"{{{long_key} = 1}}"})


def test_a_config_can_come_from_a_pipe() -> None:
    reader, writer = os.pipe()
    os.write(writer, MINIMAL.encode())
    os.close(writer)
    assert load_config(f"/dev/fd/{reader}") == parse_config(tomllib.loads(MINIMAL))
    os.close(reader)


def test_a_frozen_config_can_not_be_changed() -> None:
    config = parse_config({"data": {"train": "x"}})
    with pytest.raises(ValueError, match="frozen"):
        config.train.lr = 3.0  # type: ignore[misc]


def test_every_field_has_a_description() -> None:
    schema = RunConfig.model_json_schema()
    for section in schema["$defs"].values():
        for name, field in section["properties"].items():
            assert field.get("description"), name


def test_mistakes_in_python_are_our_errors() -> None:
    for make, message in (
        (lambda: Layout(replicas=0), "Layout: replicas=0 should be greater than or equal to 1"),
        (lambda: Layout(replica=2), r"Layout: replica is not a known field; did you mean replicas\?"),  # type: ignore[call-arg]
        (lambda: Layout(stages=2, blocks=(1,)), r"Layout: blocks=\[1\] must have one number >= 1 per stage"),
        (lambda: TrainConfig(lr=-1.0), "TrainConfig: lr=-1.0 should be greater than 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


def test_a_layout_shows_its_blocks() -> None:
    assert str(Layout(stages=2, blocks=(5, 1))) == "2 stages, blocks 5,1"
    everything = Layout(
        replicas=2, stages=3, chunks=4, micro_batches=5, interleave=2, adjacent="replicas", recompute=True
    )
    assert (
        everything.name
        == "2 replicas x 3 stages x 5 micro-batches x 4 chunks, interleave 2, adjacent replicas, recompute"
    )
    assert Layout(stages=2, vocab_parallel=True).name == "2 stages, vocab_parallel"
    assert str(Layout(blocks=(4,))) == "one device" and Layout(chunks=8).name == "one device x 8 chunks"
