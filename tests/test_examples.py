"""Every example runs from an empty folder, in time, and gets the figures that it is there to show.

The first two are README's, and run with its quickstart.
"""

import json
import os
import pydoc_data.topics
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SHARED = Path(__file__).parents[2] / "shared" / "data"
# Each takes well under a minute on a quiet core.
SECONDS = 200


def run(folder: Path, *command: str, seconds: float = SECONDS, **variables: str) -> str:
    """Run a command in a folder, which is its home too (for caches), one thread per process; return what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", "HOME": str(folder), **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def figures(printed: str, pattern: str) -> list[float]:
    found = re.search(pattern, printed)
    assert found is not None, printed
    return [float(figure) for figure in found.groups()]


@pytest.fixture
def ett() -> Path:
    """The table of hourly temperatures, which lies beside the project and is never part of it."""
    path = SHARED / "ett" / "ETTh1.csv"
    if not path.is_file():
        assert "CI" not in os.environ, "CI must have ../shared: a test that is skipped there tests nothing"
        pytest.skip("ETTh1.csv does not lie beside this checkout")
    return path


@pytest.mark.long
@pytest.mark.short
def test_the_forecast_beats_the_last_day_and_is_drawn(ett: Path, tmp_path: Path) -> None:
    printed = run(tmp_path, sys.executable, str(EXAMPLES / "03_forecast.py"), str(ett))
    error, naive = figures(printed, r"squared error ([\d.]+), repeating the last day ([\d.]+)")
    assert error < 0.9 * naive
    svg = ElementTree.parse(tmp_path / "forecast.svg").getroot()
    # Three lines in each of three panels.
    assert len(svg.findall(".//{http://www.w3.org/2000/svg}polyline")) == 9


@pytest.mark.long
def test_texts_are_classified_alike_by_one_rank_by_two_and_by_the_command(tmp_path: Path) -> None:
    script = str(EXAMPLES / "04_classify.py")
    alone = run(tmp_path, sys.executable, script)
    (right,) = figures(alone, r"validation: ([\d.]+)% of")
    assert right > 95
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    two = run(tmp_path, *torchrun, script)
    # The first line: later, rounding has had time to grow.
    loss, num_texts = figures(two, r"step 50  loss ([\d.]+)  (\d+) texts")
    assert [loss, num_texts] == pytest.approx(figures(alone, r"step 50  loss ([\d.]+)  (\d+) texts"), rel=0.05)
    assert figures(two, r"validation: ([\d.]+)% of")[0] > 95
    command = run(tmp_path, sys.executable, "-m", "stretto", "train", str(EXAMPLES / "04_classify.toml"))
    assert figures(command, r"step 50 \(\d+%\)  loss ([\d.]+)") == pytest.approx([loss], rel=0.05)
    assert figures(command, r"validation: loss ([\d.]+)")[0] < 0.1


@pytest.mark.long
def test_a_language_model_learns_from_articles(wikitext: Path, tmp_path: Path) -> None:
    printed = run(tmp_path, sys.executable, str(EXAMPLES / "05_documents.py"), str(wikitext))
    assert printed.startswith("60 articles to train on")
    perplexity, bits = figures(printed, r"validation: ([\d.]+) perplexity, ([\d.]+) bits per byte")
    # A word drawn at random from the vocabulary has a perplexity of 4,000.
    assert perplexity < 160 and bits < 1.6


@pytest.mark.long
@pytest.mark.short
def test_a_word_model_by_the_awd_recipe_and_a_plain_one_train_for_the_same_time(wikitext: Path, tmp_path: Path) -> None:
    few = tmp_path / "texts"
    few.mkdir()
    for name in ("valid.txt", "test.txt"):
        (few / name).write_text((wikitext / name).read_text("utf-8")[:60_000], "utf-8")
    printed = run(tmp_path, sys.executable, str(EXAMPLES / "14_word_model.py"), str(few), "1")
    result = json.loads(printed.splitlines()[-1])
    assert result["seconds"] == 1
    # Without training, a perplexity is about that of a random choice.
    assert 1 < result["awd_perplexity"] < 4000 and 1 < result["plain_perplexity"] < 4000


@pytest.mark.long
def test_a_run_that_is_killed_moved_and_cut_off_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    printed = run(tmp_path, sys.executable, str(EXAMPLES / "06_survive.py"))
    assert "resume  after step 20" in printed and "preempted: exit code 75" in printed
    found = re.search(r"60 steps; the losses differ by (\S+) at most", printed)
    assert found is not None and float(found[1]) < 1e-4


def prepare_manual(folder: Path) -> None:
    """Python's own manual, as README's quickstart prepares it."""
    text = pydoc_data.topics.__file__
    prepare = ["prepare", "text", text, "--out", "data/python", "--validation-fraction", "0.1"]
    run(folder, sys.executable, "-m", "stretto", *prepare)


@pytest.mark.long
def test_a_layout_is_chosen_on_the_ranks_there_are_and_trained_in(tmp_path: Path) -> None:
    prepare_manual(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = run(tmp_path, *torchrun, str(EXAMPLES / "07_plan.py"))
    replicas, stages = figures(printed, r"chosen: (\d+) x (\d+) x")
    assert replicas * stages == 2
    (loss,) = figures(printed, r"loss ([\d.]+) after 60 steps")
    assert loss < 3.5


@pytest.mark.long
@pytest.mark.short
def test_a_trained_model_is_used(tmp_path: Path) -> None:
    prepare_manual(tmp_path)
    train = ["train", str(EXAMPLES / "01_first_model.toml"), "--train.steps", "100"]
    run(tmp_path, sys.executable, "-m", "stretto", *train)
    printed = run(tmp_path, sys.executable, str(EXAMPLES / "08_use.py"))
    (python,) = figures(printed, r"python: ([\d.]+) nats per byte")
    (noise,) = figures(printed, r"noise: ([\d.]+) nats per byte")
    assert python + 0.5 < noise
    assert figures(printed, r"(\d+) pieces of validation text")[0] > 10


@pytest.mark.long
def test_arrays_are_learned_on_two_ranks_that_python_starts(tmp_path: Path) -> None:
    script = EXAMPLES / "09_arrays.py"
    result = json.loads(run(tmp_path, sys.executable, str(script)).splitlines()[-1])
    assert result["ranks"] == 2
    assert result["loss"] < 0.02, "the variance of y is about 0.5"
    code = script.read_text().split('"""', 2)[2].splitlines()
    assert sum(bool(line.strip()) for line in code) <= 30


@pytest.mark.long
@pytest.mark.short
def test_optuna_prunes_trials_that_fall_behind_and_finds_better_ones(tmp_path: Path) -> None:
    result = json.loads(run(tmp_path, sys.executable, str(EXAMPLES / "11_optuna.py")).splitlines()[-1])
    assert result["trials"] == 8 == len([*tmp_path.glob("runs/optuna/*/log.jsonl")])
    assert 1 <= result["pruned"] <= 6
    assert result["loss"] < 0.62, "0.69 is that of a guess"


@pytest.mark.long
def test_a_trial_of_a_wandb_sweep_takes_the_agents_arguments_and_run(tmp_path: Path) -> None:
    # As the agent of W&B starts it: options, and the id of the run that it has made.
    script = str(EXAMPLES / "12_wandb_sweep.py")
    command = ["env", "-u", "WANDB_MODE", "-u", "WANDB_API_KEY", sys.executable, script, "--lr=0.01", "--hidden=32"]
    printed = run(tmp_path, *command, WANDB_RUN_ID="trial7", WANDB_SWEEP_ID="sweep1")
    result = json.loads(printed.splitlines()[-1])
    assert result["folder"] == "runs/sweep/trial7" and result["mae"] < 0.15
    assert "hidden = 32" in (tmp_path / result["folder"] / "config.toml").read_text()
    assert len([*tmp_path.glob("runs/sweep/trial7/wandb/offline-run-*-trial7")]) == 1


@pytest.mark.long
@pytest.mark.short
def test_speech_is_learned_and_transcribed_from_a_file(tmp_path: Path) -> None:
    if shutil.which("espeak-ng") is None:
        pytest.skip("the program espeak-ng is not installed")
    printed = run(tmp_path, sys.executable, str(EXAMPLES / "10_speech.py"), "--quick")
    result = json.loads(printed.splitlines()[-1])
    assert 0 <= result["word_error_rate"] <= 2 and (tmp_path / "heard.wav").stat().st_size > 10_000


@pytest.mark.long
def test_speech_of_new_voices_is_understood(tmp_path: Path) -> None:
    if shutil.which("espeak-ng") is None:
        pytest.skip("the program espeak-ng is not installed")
    printed = run(tmp_path, sys.executable, str(EXAMPLES / "10_speech.py"), seconds=1200)
    assert json.loads(printed.splitlines()[-1])["word_error_rate"] <= 0.05
    assert re.findall(r"after [\d.]+ s: (\w+)", printed) == ["three", "one", "four", "one", "five", "nine"]


def test_speech_without_espeak_says_what_to_install(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "10_speech.py"), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "install the package espeak-ng" in done.stderr


@pytest.mark.long
@pytest.mark.short
def test_a_tagger_is_trained_with_both_losses(tmp_path: Path) -> None:
    printed = run(tmp_path, sys.executable, str(EXAMPLES / "13_tagging.py"), "--quick")
    assert json.loads(printed.splitlines()[-1]).keys() == {"crf_f1", "cross_entropy_f1"}


@pytest.mark.long
def test_a_crf_finds_more_names_than_cross_entropy(tmp_path: Path) -> None:
    result = json.loads(run(tmp_path, sys.executable, str(EXAMPLES / "13_tagging.py")).splitlines()[-1])
    assert result["crf_f1"] > 0.6 and result["crf_f1"] > result["cross_entropy_f1"] + 0.02


@pytest.mark.long
@pytest.mark.short
def test_a_policy_learns_to_remember(tmp_path: Path) -> None:
    printed = run(tmp_path, sys.executable, str(EXAMPLES / "15_recurrent_policy.py"))
    assert json.loads(printed.splitlines()[-1])["success"] > 0.95
