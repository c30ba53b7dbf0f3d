"""`stretto plan`, `stretto profile` and `layout = "auto"`, as a person uses them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.profiles import kind, profile
from stretto import Layout, Run, World, load_config
from stretto.base.units import format_seconds
from stretto.cli.main import main
from stretto.errors import ConfigError, PlanError
from stretto.measure.profile_input import ProfileInput
from stretto.plan import Cluster, save_profile
from stretto.plan.cost_model import CostModel
from stretto.plan.predict import predict
from stretto.plan.serialize import layout_toml
from stretto.plan.workload import Workload
from stretto.planning import profiles


@pytest.fixture
def run_toml(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of four blocks, in a folder of its own that also keeps its profiles."""
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "text", str(text_file), "--out", "data"]) == 0
    (tmp_path / "run.toml").write_text(
        '[data]\ntrain = "data"\nlanes = 8\nwindow = 16\ncache = "cache"\n[model]\nhidden = 16\n'
        '[train]\nsteps = 12\n[run]\nfolder = "runs/one"\nlog_every = 6\n'
    )
    return tmp_path / "run.toml"


def by_hand(path: Path, cost: float, **options: float) -> str:
    save_profile(profile([kind(0, 0), kind(cost, cost), kind(cost, cost), kind(cost, cost)], **options), path)  # type: ignore[arg-type]
    return str(path)


def test_a_plan_recommends_a_layout_and_says_why(run_toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heavy = by_hand(run_toml.parent / "heavy.json", 0.1)
    options = ["--devices", "2", "--json", "plan.json", "--html", "plan.html"]
    assert main(["plan", "run.toml", "--profile", heavy, *options]) == 0
    said = capsys.readouterr().out
    for words in (
        ">  2 replicas ",
        "use 2 devices as 2 replicas",
        "times as fast as one device",
        "[layout]",
        "the plan is in plan.json and plan.html\n",
    ):
        assert words in said
    plan = json.loads(Path("plan.json").read_text())
    assert plan["advice"] in said
    assert plan["best"][0]["speed_up"] > 1.5 and plan["one_device"]["fits"]
    assert plan["speed_up_over"] == "the best layout on one device" and plan["fused_blocks"] == []
    page = Path("plan.html").read_text()
    assert page.startswith("<!doctype html>") and "<svg" in page
    assert "src=" not in page and "href=" not in page and "http:" not in page, "it opens without a network"


def test_a_plan_compares_the_layout_in_the_config(run_toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heavy = by_hand(run_toml.parent / "heavy.json", 0.1)
    plan_args = ["plan", "run.toml", "--profile", heavy, "--devices", "2", "--json", "plan.json", "--html", "plan.html"]

    def plan(*options: str) -> tuple[str, dict[str, Any]]:
        assert main([*plan_args, *options]) == 0
        return capsys.readouterr().out, json.loads(Path("plan.json").read_text())

    said, values = plan()
    assert "in the config" not in said and values["comparison"] == "", "the advice compares with one device"
    said, values = plan("--layout.stages", "2", "--layout.chunks", "2", "--layout.elastic", "true")
    own, best = values["configured"], values["best"][0]
    blocks = ",".join(map(str, own["layout"]["blocks"]))
    own_time, best_time = format_seconds(own["seconds"]), format_seconds(best["seconds"])
    ratio = own["seconds"] / best["seconds"]
    times = f"is predicted to take {own_time} per step, {ratio:.2f} times as long as the chosen one ({best_time})"
    sentence = f"the layout in the config, 2 stages x 2 chunks, blocks {blocks}, {times}"
    assert f"\n{sentence}\n" in said and values["comparison"] == sentence
    page = Path("plan.html").read_text()
    assert sentence in page
    for start in ("<span>", '<td class="text">'):  # in the chart, and in the table
        assert page.count(f"{start}2 stages x 2 chunks (in the config)</") == 1
    # In a terminal of 80 columns, the name goes on in the next line.
    assert any(line.startswith("    2 stages x 2 ") and own_time in line for line in said.splitlines())


@pytest.mark.parametrize("options", [[], ["--interleave", "2"], ["--adjacent", "replicas"], ["--elastic", "true"]])
def test_a_plan_says_if_the_layout_in_the_config_is_the_best(
    options: list[str], run_toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heavy = by_hand(run_toml.parent / "heavy.json", 0.1)
    replicas = "4" if "--elastic" in options else "2"  # an elastic layout is fitted to the devices
    options = ["--layout.replicas", replicas, *(option.replace("--", "--layout.") for option in options)]
    assert main(["plan", "run.toml", "--profile", heavy, "--devices", "2", *options]) == 0
    said = capsys.readouterr().out
    assert "\nthe chosen layout is the one in the config\n" in said and said.count("  2 replicas ") == 1, "one row"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--stages", "8"], "layout.stages=8 exceeds the model's number of blocks; use at most 4"),
        (["--blocks", "3"], "layout.blocks=[3] has 3 blocks in total, but the model has 4"),
        (["--replicas", "4"], "the layout needs 4 devices (4 replicas), but the plan is for 2; plan for more devices"),
        (["--chunks", "17"], "layout.chunks=17 exceeds data.window=16; use fewer chunks"),
        (["--micro_batches", "60"], "layout.replicas=1 x layout.micro_batches=60 exceeds the 8 rows of the smallest"),
        (["--stages", "2", "--vocab_parallel", "true"], "layout.vocab_parallel=true needs a last block with a table"),
    ],
)
def test_a_plan_says_why_the_layout_in_the_config_is_not_compared(
    options: list[str], reason: str, run_toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heavy = by_hand(run_toml.parent / "heavy.json", 0.1)
    options = [option.replace("--", "--layout.") for option in options]
    assert main(["plan", "run.toml", "--profile", heavy, "--devices", "2", "--json", "plan.json", *options]) == 0
    said, values = capsys.readouterr().out, json.loads(Path("plan.json").read_text())
    assert f"\nthe layout in the config is not compared: {reason}" in said and values["configured"] is None
    assert reason in values["comparison"]


def test_a_model_that_is_too_small_stays_on_one_device(run_toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    light = by_hand(run_toml.parent / "light.json", 1e-7)
    assert main(["plan", "run.toml", "--profile", light, "--devices", "4"]) == 0
    assert "stay on one device: the best layout on several" in capsys.readouterr().out


def test_a_plan_says_which_block_keeps_it_from_trying_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code.py").write_text(
        "import numpy as np\n"
        "from stretto.data import from_arrays\n"
        "from stretto.nn import Block, Linear, Stack\n"
        "class PeeksAhead(Block):\n"
        "    causal = False\n"
        "    def forward(self, x, state): return x.flip(0), state\n"
        "def data(): return from_arrays(np.zeros((8, 4, 3)), np.zeros((8, 4, 1))), None\n"
        "def model(task): return Stack([PeeksAhead(), Linear(3, 1)])\n"
    )
    (tmp_path / "run.toml").write_text('[data]\nfactory = "code.py:data"\n[model]\nfactory = "code.py:model"\n')
    save_profile(profile([kind(0.1, 0.2)] * 2), tmp_path / "by_hand.json")
    assert main(["plan", "run.toml", "--profile", "by_hand.json", "--devices", "2"]) == 0
    said = capsys.readouterr().out
    assert "note: no spans were considered: layout.spans can't split PeeksAhead in time: it looks ahead" in said


def test_other_devices_are_planned_from_a_data_sheet(run_toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.toml", "--hardware", "H100", "--devices", "16", "--nodes", "2"]) == 0
    said = capsys.readouterr().out
    assert "16 x H100 80 GB SXM on 2 nodes, fp32, estimated from the data sheet" in " ".join(said.split())
    assert "memory includes 688 MB for each NCCL communicator of a rank" in said
    assert "stay on one device" in said and "[layout]" not in said, "there is nothing to set"
    assert "speed-up over the fastest way to run on one device, with adjacent recurrent layers fused" in said
    assert main(["profile", "run.toml", "--hardware", "A100", "--out", "a100.json"]) == 0
    files = ["--json", "plan.json", "--html", "plan.html"]
    assert main(["plan", "run.toml", "--profile", "a100.json", "--devices", "8", *files]) == 0
    plan = json.loads(Path("plan.json").read_text())
    assert plan["fused_blocks"] == [2], "the second of two LSTM layers"
    assert plan["speed_up_over"].startswith(
        "the fastest way to run on one device, with adjacent recurrent layers fused"
    )
    assert f"Speed-up over {plan['speed_up_over']}." in Path("plan.html").read_text()


def test_a_data_sheet_has_a_speed_for_each_precision(run_toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = ["--hardware", "H100", "--model.hidden", "2048", "--model.layers", "8", "--data.lanes", "64"]
    seconds = {}
    for name, options in {
        "fp32": [],
        "tf32": ["--run.tf32", "true"],
        "bf16": ["--run.precision", "bf16", "--run.tf32", "true"],
    }.items():
        assert main(["plan", "run.toml", "--json", "plan.json", *large, *options]) == 0
        assert f"H100 80 GB SXM, {name}, estimated" in " ".join(capsys.readouterr().out.split())
        plan = json.loads(Path("plan.json").read_text())
        assert plan["precision"] == name
        seconds[name] = plan["one_device"]["seconds"]
    assert seconds["fp32"] > 2 * seconds["tf32"] > 2 * seconds["bf16"]


def test_a_plan_says_if_dropout_keeps_layers_apart(run_toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--hardware", "H100", "--devices", "8", "--model.dropout", "0.1", "--model.layers", "8"]
    sizes = ["--model.hidden", "2048", "--data.lanes", "64", "--run.precision", "bf16"]
    assert main(["plan", "run.toml", *options, *sizes]) == 0
    said = capsys.readouterr().out
    assert "where layers run one by one because of the dropout between them; a deep nn.LSTM" in said
    assert "times as fast as one device, which runs the layers one by one (" in said


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--devices", "0"], "--devices=0 and --nodes=1 must be positive; use at least 1 of each"),
        (["--devices", "5", "--nodes", "2"], "--devices=5 is not a multiple of --nodes=2"),
        (["--memory", "much"], "--memory=much is not a valid number with a unit; write it like 24GB"),
        (["--memory", "1kB"], "needs more than 1 kB"),
        (["--memory", "24"], "--memory=24 is not a valid number with a unit; write it like 24GB"),
        (["--intra-node-link", "3,300"], "--intra-node-link=3,300 is not a latency and a bandwidth"),
        (
            ["--intra-node-link", "3us,300"],
            "--intra-node-link=3us,300: bandwidth=300 is not a valid number with a unit; write it like 24GB",
        ),
        (
            ["--intra-node-link", "3us,1e9TB"],
            "--intra-node-link=3us,1e9TB: bandwidth=1e9TB is not a valid number with a unit",
        ),
        (
            ["--inter-node-link", "fast"],
            "--inter-node-link=fast is not a latency and a bandwidth; write it like 5us,25GB/s",
        ),
        (["--hardware", "Z80"], "--hardware=Z80 and --profile=here.json both choose the profile; leave one out"),
        (["--json", "no/such/folder/plan.json"], "no/such/folder/plan.json can't be written"),
        (["--try", "-1"], "--try=-1 must be at least 0; 0 tries no layout"),
        (["--try", "3", "--nodes", "2"], "--try=3 runs layouts on this machine, but --nodes=2 plans for another"),
        (["--layout.blocks", "2,3"], "must have one number >= 1 per stage (stages=1)"),
    ],
)
def test_an_error_ends_in_one_sentence(
    options: list[str], sentence: str, run_toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand(Path("here.json"), 0.1)
    assert main(["plan", "run.toml", "--profile", "here.json", *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.splitlines()) == 1


@pytest.mark.long
@pytest.mark.short
def test_a_plan_tries_the_best_layouts_and_takes_the_fastest(run_toml: Path, capfd: pytest.CaptureFixture[str]) -> None:
    heavy = by_hand(run_toml.parent / "heavy.json", 0.1)
    options = ["--devices", "2", "--json", "plan.json", "--html", "plan.html", "--try", "2", "--layout.chunks", "2"]
    assert main(["plan", "run.toml", "--profile", heavy, *options]) == 0
    said = capfd.readouterr().out
    assert "plan: trying 3 layouts" in said and "tried 3 layouts (" in said and "measured" in said, (
        "two, and that in the config"
    )
    plan = json.loads(Path("plan.json").read_text())
    assert plan["trials"][2]["layout"]["chunks"] == 2 and plan["configured"]["measured_seconds"]
    assert len(plan["trials"]) == 3 and all(trial["steps"] >= 4 and trial["measured"] > 0 for trial in plan["trials"])
    fastest = min(plan["trials"], key=lambda trial: trial["measured"])
    assert plan["best"][0]["layout"] == fastest["layout"] == plan["timeline"]["layout"]
    assert "Layouts that were tried before the choice" in Path("plan.html").read_text()
    assert main(["plan", "run.toml", "--profile", heavy, *options]) == 0
    assert "plan: trying" not in capfd.readouterr().out, "the trials are cached"


@pytest.mark.long
def test_a_layout_in_which_a_rank_runs_out_of_memory_is_left_out_with_a_note(
    run_toml: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("code.py").write_text(
        "import os, torch\n"
        "from stretto.nn import LSTM, Block, Embedding, Linear, Stack\n"
        "class Greedy(Block):\n"
        "    def forward(self, x, state):\n"
        "        if os.environ.get('RANK') == '1' and x.shape[1] == 4: torch.empty(2**60)\n"
        "        return x, state\n"
        "def model(task): return Stack([Embedding(256, 16), LSTM(16, 16), Greedy(), Linear(16, 256)])\n"
    )
    Path("run.toml").write_text(
        '[data]\ntrain = "data"\nlanes = 8\nwindow = 16\ncache = "cache"\n[model]\nfactory = "code.py:model"\n'
    )
    heavy = by_hand(Path("heavy.json"), 0.1)
    assert main(["plan", "run.toml", "--profile", heavy, "--devices", "2", "--json", "plan.json", "--try", "2"]) == 0
    plan = json.loads(Path("plan.json").read_text())
    failed, *others = sorted(plan["trials"], key=lambda trial: trial["measured"] or 0.0)
    assert failed["measured"] is None and failed["note"] == "the ranks that tried it failed"
    assert len(others) == 2 and all(trial["measured"] for trial in others), "one of the best two, and one device"
    assert plan["best"][0]["layout"] == others[0]["layout"]
    assert "the trial of 2 replicas ran out of memory on rank 1, for which other ranks wait" in capfd.readouterr().err
    assert not Path("cache/trials").exists(), "it may have been for lack of memory that another job used"


class MeasuredError(Exception):
    """Ends the command where it would measure."""


def test_a_rank_is_measured_on_its_own_device(run_toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []

    def measure(profile_input: ProfileInput, world: World, *_: object) -> None:
        devices.extend([profile_input.device, world.device])
        raise MeasuredError

    def find_device(name: str) -> torch.device:
        pytest.fail(f"found {name} without the local rank, which is the first GPU on every rank")

    for variable in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(variable, "0")
    for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr("stretto.measure.profile.measure_on_ranks", measure)
    monkeypatch.setattr("stretto.planning.profiles.find_device", find_device)
    with pytest.raises(MeasuredError):
        main(["profile", "run.toml"])
    assert devices == [torch.device("cpu")] * 2


def test_a_profile_of_another_model_is_an_error(run_toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.toml", "--profile", "nowhere.json"]) == 2
    assert "--profile=nowhere.json is not a file; create it with `stretto profile --out`" in capsys.readouterr().err
    for command in ("plan", "profile"):
        assert main([command, "run.toml", "--hardware", "Z80", "--data.train", "absent"]) == 2, "before data is opened"
        assert "--hardware=Z80 is unknown; choose from A100, H100" in capsys.readouterr().err
    save_profile(profile([kind()] * 2), Path("two.json"))
    assert main(["plan", "run.toml", "--profile", "two.json"]) == 2
    assert "the number of blocks in two.json is 2, but that of this model is 4" in capsys.readouterr().err


def test_a_damaged_profile_in_the_cache_is_measured_again_but_not_one_of_the_user(
    run_toml: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(run_toml)
    profile_input = profiles.profile_input_from_config(config)
    path = profiles.profile_path(config.data.cache, profile_input)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    monkeypatch.setattr(profiles, "launch_profile", lambda config, path, *_: by_hand(path, 1.0))
    for _ in range(2):
        assert len(profiles.find_profile(config, profile_input).blocks) == 4
    (record,) = caplog.records
    assert record.getMessage().startswith("measuring again, as a profile in the cache can't be used")
    Path("mine.json").write_text("{")
    with pytest.raises(PlanError, match=r"mine\.json is not a valid profile"):
        profiles.find_profile(config, profile_input, Path("mine.json"))


def test_the_section_to_paste_is_the_layout_that_was_chosen(tmp_path: Path) -> None:
    for layout in (
        Layout(),
        Layout(stages=2, chunks=4, recompute=True, blocks=(2, 2)),
        Layout(replicas=4, stages=2, micro_batches=2, adjacent="replicas", blocks=(1, 3)),
    ):
        load = Workload.of(8, 16)
        costs = CostModel(profile([kind()] * 4))
        blocks = layout.blocks or (4,)
        found = predict(costs, load, layout.model_copy(update={"blocks": blocks}), Cluster(8))
        (tmp_path / "run.toml").write_text(f'{layout_toml(found.layout)}\n[data]\ntrain = "data"\n')
        assert load_config(tmp_path / "run.toml").layout == layout


def test_auto_excludes_other_layout_options(run_toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.toml", "--layout.auto", "true", "--layout.stages", "2"]) == 2
    assert "auto can't be combined with stages; leave out one or the other" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"layout\.auto has not been resolved"):
        Run(load_config("run.toml", {"layout.auto": "true"}))


@pytest.mark.long
def test_auto_measures_chooses_trains_and_compares(run_toml: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = run_toml.read_text()
    run_toml.write_text('layout = "auto"\n' + text)
    assert main(["train", "run.toml"]) == 0
    said = capfd.readouterr().out
    assert "profile: measuring lstm" in said
    assert "plan    stay on one device" in said or "plan    use " in said
    assert "plan    predicted:" in said and "step 12/12" in said
    lines = [json.loads(line) for line in Path("runs/one/log.jsonl").read_text().splitlines()]
    compared = [line for line in lines if "predicted" in line]
    assert len(compared) == 1 and compared[0]["measured"] > 0
    assert len(list(Path("cache/profiles").iterdir())) == 1
    # Measured once; the next run reads it.
    assert main(["train", "run.toml", "--run.folder", "runs/two", "--train.steps", "1"]) == 0
    said = capfd.readouterr().out
    assert "profile: measuring" not in said and "plan: trying" not in said


@pytest.mark.long
def test_auto_under_torchrun_uses_the_ranks_that_were_started(run_toml: Path) -> None:
    run_toml.write_text('layout = "auto"\n' + run_toml.read_text())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*torchrun, "-m", "stretto", "train", "run.toml"],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "plan    use 2 " in done.stdout and done.stdout.count("plan    predicted:") == 1
    plan = json.loads(Path("runs/one/plan.json").read_text())
    assert all(found["layout"]["replicas"] * found["layout"]["stages"] == 2 for found in plan["best"])
    # They are not tried if the others are predicted to be far slower.
    assert (f"plan    tried {len(plan['trials'])} layouts (" in done.stdout) == bool(plan["trials"])
    config = Path("runs/one/config.toml").read_text()
    assert "auto = false" in config, "the run's own config says what was chosen"
