"""A language model on articles: hidden state is carried through each article, and reset before the next.

python examples/05_documents.py [FOLDER]    # with wikitext-2's valid.txt and test.txt; writes data/articles
"""

import json
import re
import sys
from pathlib import Path

import stretto
from stretto import nn
from stretto.data import DocumentLanes, SequenceOptions, Sequences, prepare_sequences

default = Path(__file__).resolve().parents[2] / "shared" / "data" / "wikitext-2"
folder = Path(sys.argv[1]) if sys.argv[1:] else default
if not (folder / "valid.txt").exists():
    sys.exit("pass the folder with wikitext-2's valid.txt and test.txt")


def write_articles(text: Path, out: Path) -> Path:
    """Write one JSON line per article. Its title is ` = Title = ` between blank lines; sections have two signs."""
    _, *articles = re.split(r"(?<= \n)(?= = [^=\n]+ = \n \n)", text.read_text("utf-8"))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps({"text": article}) + "\n" for article in articles))
    return out


# A record is a document. Validation uses the vocabulary of the training data.
if not Path("data/articles").exists():
    records = write_articles(folder / "valid.txt", Path("data/articles-train.jsonl"))
    prepare_sequences(records, "data/articles/train", SequenceOptions(level="word", max_symbols=4000))
    records = write_articles(folder / "test.txt", Path("data/articles-valid.jsonl"))
    prepare_sequences(records, "data/articles/valid", SequenceOptions(like="data/articles/train"))
train, valid = (Sequences.open(f"data/articles/{part}") for part in ("train", "valid"))
print(
    f"{train.num_sequences} articles to train on, {valid.num_sequences} for validation, up to {train.longest:,} words"
)

# Articles follow each other in 16 lanes. A row of a window holds words of one article only.
lanes = DocumentLanes(train, lanes=16, window=64)
num_words = lanes.task.num_inputs
model = nn.Stack(
    [
        nn.Embedding(num_words, 128),
        nn.LockedDropout(0.3),
        nn.LSTM(128, 128),
        nn.LockedDropout(0.3),
        nn.Linear(128, num_words),
    ]
)
engine = stretto.make_engine(model, nn.CrossEntropy(), seed=1)

for report in stretto.Trainer(engine, lanes, stretto.TrainConfig(epochs=1, lr=1e-2, warmup=20)):
    if report.step % 50 == 0:
        print(f"step {report.step}  loss {report.loss:.3f}  {report.targets_per_second:,.0f} words/s")

scores = stretto.evaluate(engine, DocumentLanes(valid, lanes=16, window=64))
print(f"validation: {scores.perplexity:.1f} perplexity, {scores.bits_per_byte:.2f} bits per byte")
