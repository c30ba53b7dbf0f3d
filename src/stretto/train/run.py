"""A run from a config: its folder, its log, its events from the first step to the saved weights."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stretto.base.errors import ConfigError, DataError
from stretto.blocks.initialize import initialize
from stretto.blocks.language import language_model
from stretto.blocks.losses import TokenLoss
from stretto.blocks.stack import Stack
from stretto.config.run import RunConfig
from stretto.config.toml import dump_config, load_config
from stretto.data.corpus import Corpus
from stretto.data.lanes import Lanes
from stretto.data.vocabulary import Vocabulary, read_vocabulary, write_vocabulary
from stretto.engine.local import LocalEngine
from stretto.train.evaluate import Evaluation, evaluate
from stretto.train.trainer import StepReport, Trainer

CONFIG = "config.toml"
LOG = "log.jsonl"
WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class EvaluationReport:
    """The held-out loss after some steps."""

    step: int
    evaluation: Evaluation


class Run:
    """A run that is ready to go: everything it needs was found and fits together.

    `for event in run.events(): ...` trains, evaluates and logs; an event is a StepReport or an EvaluationReport.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.folder = config.run.folder
        if (self.folder / CONFIG).exists():
            raise ConfigError(
                f"run.folder={self.folder} holds a run already; choose another --run.folder, or delete it"
            )
        train, self.valid = _open_data(config)
        self.vocabulary = train.corpus.vocabulary
        with torch.device("meta"):
            stack = language_model(config.model, len(self.vocabulary))
        initialize(stack, config.run.seed, find_device(config.run.device))
        engine = LocalEngine(stack, TokenLoss(), slices=config.layout.slices, precision=config.run.precision)
        self.trainer = Trainer(engine, train, config.train, seed=config.run.seed)

    def events(
        self, on_window: Callable[[int, int], None] = lambda done, total: None
    ) -> Iterator[StepReport | EvaluationReport]:
        """Train to the end; `on_window` is told how far an evaluation is."""
        self._create_folder()
        with (self.folder / LOG).open("w", encoding="utf-8", buffering=1) as log:
            for report in self.trainer:
                log.write(_line("step", asdict(report)))
                yield report
                if self.valid is not None and self._is_due(report.step):
                    evaluation = evaluate(self.trainer.engine, self.valid, on_window=on_window)
                    log.write(_line("evaluation", {"step": report.step, **_scores(evaluation)}))
                    yield EvaluationReport(report.step, evaluation)
        save_weights(self.trainer.engine.stack, self.folder / WEIGHTS)

    def _is_due(self, step: int) -> bool:
        every = self.config.run.eval_every
        return step == self.trainer.num_steps or (every is not None and step % every == 0)

    def _create_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / CONFIG).write_text(dump_config(self.config), encoding="utf-8")
            write_vocabulary(self.folder, self.vocabulary)
        except OSError as error:
            raise ConfigError(f"run.folder={self.folder} can't be written ({error.strerror}); choose another") from None


@dataclass(frozen=True)
class TrainedModel:
    """What a finished run left: its config, its vocabulary, and the stack with its weights."""

    config: RunConfig
    vocabulary: Vocabulary
    stack: Stack

    def evaluate(self, folder: Path, on_window: Callable[[int, int], None] = lambda done, total: None) -> Evaluation:
        """Return the loss on the corpus in `folder`."""
        corpus = Corpus.open(folder)
        if corpus.vocabulary != self.vocabulary:
            raise DataError(
                f"{folder} has another vocabulary than the run; prepare it with the run's corpus as --vocabulary"
            )
        lanes = Lanes.fitting(corpus, self.config.data.lanes, self.config.data.window)
        engine = LocalEngine(self.stack, TokenLoss(), precision=self.config.run.precision)
        return evaluate(engine, lanes, on_window=on_window)


def load_run(folder: Path) -> TrainedModel:
    """Load a finished run from its folder, onto the device that its config names."""
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} holds no run ({CONFIG} is missing); give the folder of a run")
    config = load_config(folder / CONFIG)
    vocabulary = read_vocabulary(folder)
    with torch.device("meta"):
        stack = language_model(config.model, len(vocabulary))
    load_weights(stack, folder / WEIGHTS)
    return TrainedModel(config, vocabulary, stack.to(find_device(config.run.device)))


def save_weights(stack: Stack, path: Path) -> None:
    """Write a stack's weights as safetensors, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    save_file({name: tensor.contiguous() for name, tensor in stack.state_dict().items()}, partial)
    partial.rename(path)


def load_weights(stack: Stack, path: Path) -> None:
    """Read weights into a stack, which may be on the meta device; names and shapes must be its own."""
    if not path.is_file():
        raise DataError(f"{path} does not exist; the run has not finished")
    try:
        stack.load_state_dict(load_file(path), assign=True)
    except (SafetensorError, RuntimeError) as error:
        first = str(error).strip().splitlines()[-1].strip()
        raise DataError(f"{path} does not hold this model's weights ({first}); train again") from None


def find_device(name: str) -> torch.device:
    """Return the device a config names; `auto` is the accelerator if there is one."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise ConfigError(f"run.device={name!r} is not a device of this machine; use auto or cpu") from None
    return device


def _open_data(config: RunConfig) -> tuple[Lanes, Lanes | None]:
    data = config.data
    train = Lanes(Corpus.open(data.train), data.lanes, data.window)
    if data.valid is None:
        return train, None
    corpus = Corpus.open(data.valid)
    if corpus.vocabulary != train.corpus.vocabulary:
        raise DataError(
            f"data.valid={data.valid} has another vocabulary than data.train={data.train}; "
            "prepare it with --vocabulary set to the training corpus"
        )
    return train, Lanes.fitting(corpus, data.lanes, data.window)


def _scores(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "loss": evaluation.loss,
        "perplexity": evaluation.perplexity,
        "bits_per_byte": evaluation.bits_per_byte,
        "tokens": evaluation.tokens,
    }


def _line(kind: str, values: dict[str, Any]) -> str:
    return json.dumps({"kind": kind, **values}) + "\n"
