"""Error rates and entity F1 by name, in evaluations, on several ranks, and as what a run monitors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.rank_pool import RankPools
from helpers.row_loss_cases import RaggedRows, RowCase, make_model
from stretto import Layout, Run, RunConfig, World, evaluate, load_model, make_engine
from stretto.base.position import Position
from stretto.data import Batches, SequenceOptions, from_arrays, prepare_sequences
from stretto.errors import ConfigError
from stretto.nn import LSTM, CrossEntropy, CTCLoss, Linear, Stack
from stretto.serve import ctc_greedy
from stretto.train import EntityCounts, ErrorRate, EvaluationReport

SYMBOLS = ("", "a", "b", " ", "c")
TAGS = ("O", "B-X", "I-X", "B-Y", "I-Y")
ERROR_RATES = ("error_rate", "word_error_rate", "character_error_rate")


def score(world: World, case: RowCase, layout: Layout, names: tuple[str, ...]) -> dict[str, float]:
    model, loss = make_model(case)
    engine = make_engine(model, loss, layout, world, seed=3)
    class_names = SYMBOLS if case.loss == "ctc" else TAGS
    return dict(evaluate(engine, RaggedRows(case), metrics=names, class_names=class_names).metrics)


def run_by_hand(case: RowCase) -> tuple[ErrorRate, ErrorRate, EntityCounts]:
    """Compute the scores row by row, without metrics."""
    model, loss = make_model(case)
    stack = make_engine(model, loss, seed=3).stack.eval()
    rows = RaggedRows(case)
    symbols, words, entities = ErrorRate(), ErrorRate(), EntityCounts()
    for index in range(rows.num_windows):
        position = replace(Position(), index=index)
        window = rows.read(position)
        assert window.inputs is not None and window.targets is not None
        with torch.no_grad():
            y, _ = stack(window.inputs, stack.begin(window.rows(0, torch.device("cpu"), case.dtype)))
        for row, length in enumerate(window.lengths.tolist()):
            target = [code for code in window.targets[:, row].tolist() if code >= 0]
            if case.loss == "ctc":
                path = ctc_greedy(y[:length, row].log_softmax(-1)) if length else []
                symbols += ErrorRate.of(path, target)
                words += ErrorRate.of_words(*("".join(SYMBOLS[code] for code in codes) for codes in (path, target)))
                continue
            tags: Any = loss
            best = tags.decode(y[:, row : row + 1], torch.tensor([length]))[:length, 0].tolist()
            codes = window.targets[:length, row].tolist()
            entities += EntityCounts.of(
                [TAGS[tag] if code >= 0 else "O" for tag, code in zip(best, codes, strict=True)],
                [TAGS[code] if code >= 0 else "O" for code in codes],
            )
    return symbols, words, entities


LAYOUTS = [Layout(stages=2, chunks=3, micro_batches=2), Layout(replicas=2)]


def test_error_rates_are_sums_over_all_rows_in_any_layout(pools: RankPools) -> None:
    case = RowCase("ctc", seed=4)
    symbols, words, _ = run_by_hand(case)
    assert symbols.num_edits > 0 and words.num_targets > 0
    alone = score(World(rank=0, size=1, device=torch.device("cpu")), case, Layout(), ERROR_RATES)
    assert alone["error_rate"] == pytest.approx(symbols.rate)
    assert alone["character_error_rate"] == pytest.approx(symbols.rate), "each symbol is a character"
    assert alone["word_error_rate"] == pytest.approx(words.rate)
    for layout in LAYOUTS:
        for scores in pools[2].run(score, case, layout, ERROR_RATES):
            assert scores == pytest.approx(alone)


def test_entity_f1_is_that_of_the_decoded_tags_in_any_layout(pools: RankPools) -> None:
    case = RowCase("crf", seed=2)
    _, _, entities = run_by_hand(case)
    assert 0 < entities.f1 < 1
    for layout in LAYOUTS:
        for scores in pools[2].run(score, case, layout, ("entity_f1",)):
            assert scores == pytest.approx({"entity_f1": entities.f1})


def test_a_model_may_predict_classes_that_the_data_lacks() -> None:
    """The first outputs are the data's classes; the others have no names, and are wrong."""
    scores_of = np.eye(4, dtype=np.float32)  # of each class
    identity = Linear(4, 4, bias=False)
    with torch.no_grad():
        identity.module.get_parameter("weight").copy_(torch.eye(4))
    symbols = from_arrays([scores_of[[1, 3, 2]]], [["a", "b"]], target_kind="sequence_per_row", classes=["a", "b"])
    engine = make_engine(Stack([identity]), CTCLoss())
    scores = evaluate(engine, Batches(symbols, max_rows=1), metrics=ERROR_RATES, class_names=symbols.labels)
    assert scores.metrics["error_rate"] == 0.5, "a and b are right, and another symbol is between them"
    tags = from_arrays([scores_of[[0, 3, 1]]], [["B-X", "O", "I-X"]], target_kind="class_per_step")
    assert tags.labels == ("B-X", "I-X", "O")
    engine = make_engine(Stack([identity]), CrossEntropy())
    scores = evaluate(engine, Batches(tags, max_rows=1), metrics=["entity_f1"], class_names=tags.labels)
    assert scores.metrics["entity_f1"] == 1.0, "what is not a tag is outside of entities"


def test_ctc_predicts_the_symbols_of_the_most_likely_path() -> None:
    torch.manual_seed(1)
    y, lengths = torch.randn(20, 6, 4), torch.tensor([20, 0, 1, 13, 7, 20])
    for blank in (0, 2):
        symbols = CTCLoss(blank).predictions(y, lengths)
        for row, length in enumerate(lengths.tolist()):
            expected = ctc_greedy(y[:length, row], blank) if length else []
            assert [symbol for symbol in symbols[:, row].tolist() if symbol != -100] == expected
    assert CTCLoss().predictions(torch.zeros(3, 2, 4), torch.tensor([3, 1])).shape == (0, 2)


def write_letters(folder: Path) -> None:
    draw = np.random.default_rng(1)
    texts = [" ".join("".join(draw.choice(["a", "b"], 2)) for _ in range(draw.integers(1, 3))) for _ in range(80)]
    sounds = {letter: draw.normal(size=(3, 4)) for letter in "ab "}
    rows = [np.concatenate([sounds[letter] for letter in text]) for text in texts]
    items = from_arrays(rows, texts, target_kind="sequence_per_row")
    prepare_sequences(items, folder / "data", SequenceOptions(validation_fraction=0.3))


def run_config(folder: Path, **metrics: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"folder": folder / "run", "device": "cpu", "eval_every": 10},
            "data": {"train": str(folder / "data/train"), "valid": str(folder / "data/valid"), "budget": 200},
            "model": {"layers": 1, "hidden": 24},
            "train": {"steps": 60, "lr": 0.02, "patience": 9},
            "save": {"keep_best": True},
            "metrics": metrics,
        }
    )


def test_a_run_keeps_the_checkpoint_with_the_lowest_word_error_rate(tmp_path: Path) -> None:
    write_letters(tmp_path)
    run = Run(run_config(tmp_path, names=["word_error_rate", "character_error_rate"], monitor="word_error_rate"))
    evaluations = [event.evaluation for event in run.events() if isinstance(event, EvaluationReport)]
    rates = [evaluation.metrics["word_error_rate"] for evaluation in evaluations]
    assert rates[0] > 0.5 > min(rates), "it learns"
    assert all(evaluation.metrics["character_error_rate"] <= 1 for evaluation in evaluations)
    best = load_model(f"{tmp_path / 'run'}@best")
    assert best.evaluate(tmp_path / "data/valid").metrics["word_error_rate"] == pytest.approx(min(rates))


def test_metrics_that_do_not_fit_are_refused_before_the_first_step(tmp_path: Path) -> None:
    write_letters(tmp_path)
    with pytest.raises(ConfigError, match=r"'entity_f1'.*compares outputs and targets of the same time step"):
        Run(run_config(tmp_path, names=["entity_f1"]))
    rows = [np.random.default_rng(1).normal(size=(6, 3)) for _ in range(4)]
    tags = [np.array(["O", "B-X", "I-X", "O", "B-X", "O"])] * 4
    items = from_arrays(rows, tags)
    batches = Batches(items, max_rows=4)
    stack = Stack([LSTM(3, 4), Linear(4, 3)])
    engine = make_engine(stack, CrossEntropy(), seed=1)
    with pytest.raises(ConfigError, match="'word_error_rate' is for a sequence of symbols per row"):
        evaluate(engine, batches, metrics=["word_error_rate"], class_names=items.labels)
    with pytest.raises(ConfigError, match="needs the names of the classes"):
        evaluate(engine, batches, metrics=["entity_f1"])
    evaluation = evaluate(engine, batches, metrics=["entity_f1", "accuracy"], class_names=items.labels)
    assert 0 <= evaluation.metrics["entity_f1"] <= 1


def split_in_time(world: World) -> str:
    rows = [np.zeros((6, 3)) for _ in range(4)]
    items = from_arrays(rows, [np.array(["O", "B-X", "I-X", "O", "B-X", "O"])] * 4)
    engine = make_engine(Stack([LSTM(3, 4), Linear(4, 3)]), CrossEntropy(), Layout(stages=2, chunks=2), world, seed=1)
    with pytest.raises(ConfigError) as error:
        evaluate(engine, Batches(items, max_rows=4), metrics=["entity_f1"], class_names=items.labels)
    return str(error.value)


def test_entities_are_not_counted_in_parts_of_rows(pools: RankPools) -> None:
    for message in pools[2].run(split_in_time):
        assert "the layout splits them in time; use chunks=1 and spans=1, or a loss over whole rows" in message
