"""`stretto init --tokenizer`, then train, generate and export: the tokenizer goes along."""

import json
from pathlib import Path

import onnx
import pytest

from stretto import load_model
from stretto.cli.main import main
from stretto.serve import Sampling, generate, generate_tokens
from stretto.store.subwords import SubwordVocabulary

pytest.importorskip("tokenizers")


def test_a_run_carries_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("the theme enters before it has ended\n" * 300)
    assert main(["init", "book.txt", "--yes", "--tokenizer", "bpe:290"]) == 0
    said = capsys.readouterr().out
    assert "predict the next subword" in said and "subword vocabulary of 28" in said
    assert main(["train", "run.toml", "--train.steps", "40", "--data.lanes", "4"]) == 0
    assert "bits per byte" in capsys.readouterr().out
    trained = load_model("runs/book")
    vocabulary = trained.data_spec.vocabulary
    assert isinstance(vocabulary, SubwordVocabulary)
    assert main(["generate", "runs/book", "--prompt", "the theme", "--length", "20"]) == 0
    assert "the theme" in capsys.readouterr().out
    stream = generate_tokens(trained.stack, vocabulary.encode("the"), Sampling(seed=1))
    tokens = [next(stream)[0] for _ in range(200)]
    pieces = [piece for (piece,) in generate(trained, "the", 200, Sampling(seed=1))]
    assert "".join(pieces) == vocabulary.decode(tokens)
    assert main(["export", "runs/book", "--onnx", "model.onnx"]) == 0
    metadata = {entry.key: entry.value for entry in onnx.load("model.onnx").metadata_props}
    exported = json.loads(metadata["stretto.vocabulary"])["tokenizer"]
    assert SubwordVocabulary.from_tree(exported, "model.onnx") == vocabulary


def test_contradicting_options_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("the theme\n")
    Path("load.csv").write_text("time,load\n" + "".join(f"2025-01-01T{hour:02}:00,{hour}\n" for hour in range(24)))
    for arguments, message in (
        (
            ["book.txt", "--tokenizer", "bpe:300", "--level", "word"],
            "bpe:300 and --level contradict each other",
        ),
        (["book.txt", "--tokenizer", "bpe:3"], "--tokenizer=bpe:3 has no size from 257 to 1,000,000; use a size"),
        (["load.csv", "--tokenizer", "bpe:300"], "--tokenizer is for text and sequences of text, but the files hold"),
    ):
        assert main(["init", *arguments, "--yes"]) == 2
        assert message in capsys.readouterr().err
