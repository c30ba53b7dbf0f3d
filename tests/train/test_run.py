import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.rank_pool import RankPools
from stretto import Run, StepReport, World, load_config, load_model
from stretto.base.tf32 import fp32_precisions, use_tf32
from stretto.checkpoint import SaveReport
from stretto.checkpoint.storage import LocalStorage
from stretto.config.run import RunConfig
from stretto.config.toml import parse_config
from stretto.data import Corpus, TextOptions, prepare_text
from stretto.engine.pipeline import PipelineEngine
from stretto.errors import ConfigError, DataError
from stretto.mesh.device import find_device
from stretto.serve import predict
from stretto.train import RankReport
from stretto.train.events import EvaluationReport, PreemptedError
from stretto.train.trainer import Request


def config_for(corpus: Corpus, folder: Path, **sections: dict[str, object]) -> RunConfig:
    data = {"train": corpus.location, "valid": corpus.location, "lanes": 8, "window": 20}
    base: dict[str, dict[str, object]] = {
        "data": data,
        "model": {"hidden": 12},
        "train": {"steps": 6},
        "run": {"folder": folder},
    }
    return parse_config({name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}})


def test_a_run_writes_config_log_vocabulary_and_weights(word_corpus: Corpus, tmp_path: Path) -> None:
    config = config_for(word_corpus, tmp_path / "run", model={"dropout": 0.1, "cell": "gru"}, run={"eval_every": 3})
    run = Run(config)
    events = list(run.events())
    steps = [StepReport] * 3
    last = [RankReport, SaveReport, EvaluationReport]
    assert [type(event) for event in events] == [*steps, EvaluationReport, *steps, *last]
    assert load_config(tmp_path / "run" / "config.toml") == config
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines].count("step") == 6
    assert {"loss", "num_targets", "gradient_norm", "learning_rate", "compute_seconds", "epoch"} <= set(lines[1])
    assert {"loss", "perplexity", "bits_per_byte", "step"} <= set(lines[-1])
    scored = events[-1]
    assert isinstance(scored, EvaluationReport)
    assert lines[-1]["loss"] == scored.evaluation.loss

    trained = load_model(tmp_path / "run")
    assert trained.data_spec.vocabulary == word_corpus.vocabulary
    for name, tensor in run.trainer.engine.stack.state_dict().items():
        assert torch.equal(tensor, trained.stack.state_dict()[name])
    assert trained.evaluate(word_corpus.location).loss == scored.evaluation.loss


def test_the_same_config_gives_the_same_bits(byte_corpus: Corpus, tmp_path: Path) -> None:
    curves = []
    for name in ("a", "b"):
        run = Run(config_for(byte_corpus, tmp_path / name, model={"dropout": 0.2}))
        curves.append([event.loss for event in run.events() if isinstance(event, StepReport)])
    assert curves[0] == curves[1]
    other = Run(config_for(byte_corpus, tmp_path / "c", model={"dropout": 0.2}, run={"seed": 2}))
    assert [event.loss for event in other.events() if isinstance(event, StepReport)] != curves[0]


def test_mistakes_are_reported_before_anything_is_written(
    byte_corpus: Corpus, word_corpus: Corpus, tmp_path: Path
) -> None:
    for sections, reason in (
        ({"data": {"train": tmp_path / "none"}}, r"the folder .*none does not exist"),
        ({"layout": {"micro_batches": 9}}, r"^layout\.replicas=1 x layout\.micro_batches=9 exceeds data\.lanes=8"),
        ({"data": {"valid": word_corpus.location}}, "differs from .* in its vocabulary"),
        ({"data": {"lanes": 10**6}}, "needs 20,000,000 tokens per step"),
        ({"run": {"device": "warp-drive"}}, r"device='warp-drive' .* is not a device"),
        ({"run": {"device": "cuda:99"}}, r"device='cuda:99' .* is not a device"),
    ):
        with pytest.raises((ConfigError, DataError), match=reason):
            Run(config_for(byte_corpus, tmp_path / "run", **sections))
    assert not (tmp_path / "run").exists()


def count_manifests(world: World, config: RunConfig, resume: str) -> int:
    """Return how often a rank reads a manifest when it resumes a run."""
    names: list[str] = []
    read = LocalStorage.read

    def counting_read(storage: LocalStorage, name: str) -> bytes:
        names.append(name)
        return read(storage, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "read", counting_read)
        run = Run(config, world, resume)
        assert run.trainer.step == 6
        run.close()
    return sum(name.endswith("manifest.json") for name in names)


def test_only_rank_0_reads_the_manifest_to_resume(byte_corpus: Corpus, tmp_path: Path, pools: RankPools) -> None:
    """It reads it to check the run before anything is written, to claim the generation, and after the claim."""
    list(Run(config_for(byte_corpus, tmp_path / "run")).events())
    # After the claim, only what other launches of this run may have changed is looked at again.
    for folder, resume, count in (("run", "auto", 3), ("other", str(tmp_path / "run"), 2)):
        config = config_for(byte_corpus, tmp_path / folder, layout={"replicas": 2})
        assert pools[2].run(count_manifests, config, resume) == [count, 0]


def test_a_folder_that_holds_a_run_is_refused(byte_corpus: Corpus, tmp_path: Path) -> None:
    config = config_for(byte_corpus, tmp_path / "run")
    list(Run(config).events())
    with pytest.raises(ConfigError, match="already holds a run"):
        Run(config, resume="never")
    assert Run(config).trainer.is_done


def test_a_longer_run_resumes_and_a_run_killed_at_its_end_is_completed(byte_corpus: Corpus, tmp_path: Path) -> None:
    def losses(folder: str, steps: int) -> list[float]:
        train = {"steps": steps, "schedule": "constant"}
        events = list(Run(config_for(byte_corpus, tmp_path / folder, train=train)).events())
        validation_losses = [event.evaluation.loss for event in events if isinstance(event, EvaluationReport)]
        return [event.loss for event in events if isinstance(event, StepReport)] + validation_losses

    whole = losses("whole", 6)
    assert losses("parts", 4)[:-1] + losses("parts", 6) == whole
    weights = tmp_path / "parts" / "weights.safetensors"
    final = weights.read_bytes()
    # Killed after the last step was saved, or after the weights were: what is left is done.
    weights.unlink()
    assert losses("parts", 6) == [] and len(weights.read_bytes()) == len(final)
    log = tmp_path / "parts" / "log.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if "evaluation" not in line))
    assert losses("parts", 6) == whole[-1:]
    assert losses("parts", 6) == []


def test_a_run_stopped_in_its_last_evaluation_is_not_finished(byte_corpus: Corpus, tmp_path: Path) -> None:
    config = config_for(byte_corpus, tmp_path / "run")
    run = Run(config)
    with pytest.raises(PreemptedError, match="stopped in the evaluation after step 6"):
        list(run.events(on_window=lambda fraction: run.trainer.request(Request.STOP)))
    # The next launch has only the evaluation left to do.
    assert [type(event) for event in Run(config).events()] == [EvaluationReport]


def test_a_folder_that_can_not_be_written_is_named(byte_corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match=r"run\.folder=/proc/nowhere/run can't be written"):
        list(Run(config_for(byte_corpus, Path("/proc/nowhere/run"))).events())


def test_a_run_that_can_not_be_loaded_is_explained(byte_corpus: Corpus, text_file: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no checkpoint"):
        load_model(tmp_path)
    run = Run(config_for(byte_corpus, tmp_path / "run"))
    events = run.events()
    next(events)
    with pytest.raises(DataError, match="holds no checkpoint"):
        load_model(tmp_path / "run")
    list(events)
    (other,) = prepare_text([text_file], tmp_path / "chars", TextOptions(level="char"))
    with pytest.raises(DataError, match="differs from the run in its vocabulary"):
        load_model(tmp_path / "run").evaluate(other.location)
    weights = tmp_path / "run" / "weights.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor[:1].contiguous() for name, tensor in tensors.items()}, weights)
    with pytest.raises(DataError, match="does not hold this model's weights"):
        load_model(tmp_path / "run")
    weights.write_bytes(b"\x80\x04junk")
    with pytest.raises(DataError, match="does not hold this model's weights"):
        load_model(tmp_path / "run")


def test_a_device_is_found_by_name() -> None:
    assert find_device("cpu") == torch.device("cpu")
    assert (find_device("auto").type == "cpu") == (not torch.accelerator.is_available())


def test_micro_batches_precision_and_seed_of_the_config_reach_the_engine(byte_corpus: Corpus, tmp_path: Path) -> None:
    run = Run(
        config_for(byte_corpus, tmp_path / "run", layout={"micro_batches": 2}, run={"precision": "bf16", "seed": 7})
    )
    assert isinstance(run.engine, PipelineEngine)
    assert run.engine.layout.micro_batches == 2 and run.trainer.seed == 7
    assert run.engine.precision == "bf16"


@pytest.mark.parametrize("tf32", [False, True])
def test_a_run_trains_evaluates_and_predicts_with_tf32_only_if_its_config_says_so(
    byte_corpus: Corpus, tmp_path: Path, tf32: bool
) -> None:
    config = config_for(byte_corpus, tmp_path / "run", run={"tf32": True} if tf32 else {}, train={"steps": 2})
    seen: set[str] = set()

    def record(*_: object) -> None:
        seen.update(fp32_precisions().values())

    run = Run(config)
    run.engine.stack.register_forward_pre_hook(record)
    with use_tf32(not tf32):
        list(run.events())
        trained = load_model(tmp_path / "run")
        trained.stack.register_forward_pre_hook(record)
        trained.evaluate(byte_corpus.location)
        list(predict(trained, byte_corpus.location))
        assert set(fp32_precisions().values()) == {"ieee" if tf32 else "tf32"}, "torch's settings are restored"
    assert seen == {"tf32" if tf32 else "ieee"}


def test_a_custom_model_and_a_custom_loss_are_trained(byte_corpus: Corpus, tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text(
        "import stretto\n"
        "def build(task):\n"
        "    blocks = [stretto.nn.Embedding(task.num_inputs, 4), stretto.nn.Linear(4, task.num_outputs)]\n"
        "    return stretto.nn.Stack(blocks)\n"
        "def loss(y, targets):\n    return stretto.nn.CrossEntropy()(y, targets)\n"
        "def mean(y, targets):\n    return y.mean()\n"
        "number = 3\n"
    )
    own: dict[str, object] = {"factory": f"{code}:build", "loss": f"{code}:loss"}
    events = list(Run(config_for(byte_corpus, tmp_path / "run", model=own)).events())
    assert isinstance(events[-1], EvaluationReport)
    for place in ("run", "run/checkpoints"):
        with pytest.raises(ConfigError, match=r"would run Python code \(model\.factory=.*set trust=True"):
            load_model(tmp_path / place)
        loaded = load_model(tmp_path / place, trust=True)
        assert loaded.evaluate(byte_corpus.location).loss == pytest.approx(events[-1].evaluation.loss)
    for model, reason in (
        ({"factory": f"{code}:"}, "does not name an object"),
        ({"factory": "mine"}, "does not name an object; write it as file.py:name"),
        ({"factory": f"{tmp_path}/gone.py:build"}, "gone.py does not exist"),
        ({"factory": "no_such_module:build"}, "needs a module that is not installed"),
        ({"factory": f"{code}:gone"}, "has no gone"),
        ({"factory": f"{code}:number"}, "gives an object of type int; name a function that returns a stretto.nn.Stack"),
        ({"loss": f"{code}:number"}, "loss is an object of type int, not a function"),
    ):
        with pytest.raises(ConfigError, match=re.escape(reason)):
            Run(config_for(byte_corpus, tmp_path / "other", model={"hidden": 4, **model}))
    with pytest.raises(ConfigError, match=r"returned an object of type Tensor; return stretto\.nn\.LossSum"):
        list(Run(config_for(byte_corpus, tmp_path / "third", model={"loss": f"{code}:mean"})).events())


@pytest.mark.long
def test_a_model_larger_than_memory_is_refused(byte_corpus: Corpus, tmp_path: Path) -> None:
    for hidden in (3 * 10**6, 10**10):
        with pytest.raises(ConfigError, match=r"the model('s .* weights can't be allocated| can't be built)"):
            Run(config_for(byte_corpus, tmp_path / "run", model={"hidden": hidden}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_a_run_on_an_accelerator_gives_the_curve_of_the_cpu(byte_corpus: Corpus, tmp_path: Path) -> None:
    curves = []
    for device in ("cpu", "auto"):
        run = Run(config_for(byte_corpus, tmp_path / device, model={"dropout": 0.2}, run={"device": device}))
        curves.append([event.loss for event in run.events() if isinstance(event, StepReport)])
    # Another device sums in another order; fp32 keeps 24 bits.
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_run_on_a_gpu_that_was_stopped_and_resumed_has_the_same_bits(byte_corpus: Corpus, tmp_path: Path) -> None:
    curves: list[list[float]] = []
    for name, stop in (("whole", None), ("stopped", 3)):
        curve: list[float] = []
        for _ in range(1 if stop is None else 2):
            run = Run(config_for(byte_corpus, tmp_path / name, model={"dropout": 0.2}, run={"device": "cuda"}))
            try:
                for event in run.events():
                    if isinstance(event, StepReport):
                        curve.append(event.loss)
                        if event.step == stop:
                            run.trainer.request(Request.STOP)
            except PreemptedError:
                pass
        curves.append(curve)
    assert curves[0] == curves[1]
    weights = [load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "stopped")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_run_that_can_no_longer_save_ends(byte_corpus: Corpus, tmp_path: Path) -> None:
    run = Run(config_for(byte_corpus, tmp_path / "run", train={"steps": 50}, save={"every": 1, "max_failures": 3}))
    for step in (1, 2, *range(4, 50)):  # step 3 can be saved
        (tmp_path / "run" / "checkpoints" / f"step-{step:09}-g1").write_text("in the way")
    saves: list[bool] = []
    with pytest.raises(
        DataError, match=r"save\.max_failures=3: so many saves in a row have failed, .*can't be written"
    ):
        for event in run.events():
            saves += [event.error is None] if isinstance(event, SaveReport) else []
    assert saves == [False, False, True, False, False, False]
