"""A language model over articles: state is carried through each of them, and never from one into the next.

python examples/05_documents.py [FOLDER]    # with wikitext-2's valid.txt and test.txt; writes data/articles
"""

import json
import re
import sys
from pathlib import Path

import stretto

beside = Path(__file__).resolve().parents[2] / "shared" / "data" / "wikitext-2"
folder = Path(sys.argv[1]) if sys.argv[1:] else beside
if not (folder / "valid.txt").exists():
    sys.exit("give the folder of wikitext-2's valid.txt and test.txt, one article after the other")


def write_articles(text: Path, out: Path) -> Path:
    """Write a line for each article: it starts at ` = Title = ` between blank lines, not at ` = = Section = = `."""
    _, *articles = re.split(r"(?<= \n)(?= = [^=\n]+ = \n \n)", text.read_text("utf-8"))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps({"text": article}) + "\n" for article in articles))
    return out


# A record is a document. The held-out ones take the vocabulary of those to train on.
if not Path("data/articles").exists():
    records = write_articles(folder / "valid.txt", Path("data/articles-train.jsonl"))
    stretto.data.prepare_sequences(records, "data/articles/train", level="word", max_symbols=4000)
    records = write_articles(folder / "test.txt", Path("data/articles-valid.jsonl"))
    stretto.data.prepare_sequences(records, "data/articles/valid", like="data/articles/train")
train, valid = (stretto.data.Sequences.open(f"data/articles/{side}") for side in ("train", "valid"))
print(f"{train.num_sequences} articles to train on, of up to {train.longest:,} words; {valid.num_sequences} held out")

# Laid into 16 lanes, one after the other: a window holds words of one article, and the next starts fresh.
lanes = stretto.data.DocumentLanes(train, lanes=16, window=64)
num_words = lanes.task.num_inputs
model = stretto.nn.Stack(
    [
        stretto.nn.Embedding(num_words, 128),
        stretto.nn.LockedDropout(0.3),
        stretto.nn.LSTM(128, 128),
        stretto.nn.LockedDropout(0.3),
        stretto.nn.Linear(128, num_words),
    ]
)
engine = stretto.make_engine(model, stretto.nn.TokenLoss(), seed=1)

for report in stretto.Trainer(engine, lanes, stretto.TrainConfig(epochs=1, lr=1e-2, warmup=20)):
    if report.step % 50 == 0:
        print(f"step {report.step}  loss {report.loss:.3f}  {report.tokens_per_second:,.0f} words/s")

scores = stretto.evaluate(engine, stretto.data.DocumentLanes(valid, lanes=16, window=64))
print(f"held out: {scores.perplexity:.1f} perplexity, {scores.bits_per_byte:.2f} bits per byte")
