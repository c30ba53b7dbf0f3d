"""Predictions of a run whose model stacks frames: each row's label is that of its last output."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto import Run, RunConfig, load_model
from stretto.data import SequenceOptions, prepare_sequences
from stretto.errors import LawError
from stretto.nn import LSTM, Embedding, Stack, StackFrames
from stretto.serve import generation, predict, prediction


def test_a_run_with_stacked_frames_predicts_the_labels_that_it_evaluates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(1)
    records = []
    for _ in range(80):
        values = draw.normal(size=(draw.integers(1, 12), 2))
        records.append({"values": values.tolist(), "y": "up" if values[-1, 0] > 0 else "down"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    prepare_sequences(tmp_path / "rows.jsonl", tmp_path / "data", SequenceOptions(label="y", validation_fraction=0.4))
    config = {
        "run": {"folder": tmp_path / "run", "device": "cpu"},
        "data": {"train": str(tmp_path / "data/train"), "valid": str(tmp_path / "data/valid"), "budget": 200},
        "model": {"layers": 1, "hidden": 8, "stack_frames": 3},
        "train": {"steps": 20, "lr": 0.05},
    }
    list(Run(RunConfig.model_validate(config)).events())
    trained = load_model(tmp_path / "run")
    assert trained.stack.stride == 3
    results = list(predict(trained, tmp_path / "data/valid"))
    evaluation = trained.evaluate(tmp_path / "data/valid")
    assert sum(result["label"] == result["true_label"] for result in results) == evaluation.num_correct
    # A few outputs at a time: chunks of a batch start at multiples of the stride.
    monkeypatch.setattr(prediction, "_MAX_OUTPUTS", 1)
    chunked = list(predict(trained, tmp_path / "data/valid"))
    assert [result["label"] for result in chunked] == [result["label"] for result in results]
    probabilities = [[result["probability"] for result in part] for part in (chunked, results)]
    np.testing.assert_allclose(probabilities[0], probabilities[1], rtol=1e-5)


def test_a_strided_model_does_not_generate() -> None:
    stack = Stack([Embedding(9, 2), StackFrames(2), LSTM(4, 9)])
    with pytest.raises(LawError, match="one output of each 2 time steps, so it has none for each token"):
        next(generation.generate_tokens(stack, torch.tensor([1]).numpy()))
