"""Find names in sentences with a BiLSTM, trained with a CRF and, for comparison, with cross-entropy per time step.

python examples/13_tagging.py            # creates its own sentences
python examples/13_tagging.py --quick    # a few steps, to see that everything works
"""

import argparse
import json
import random

import numpy as np

import stretto
from stretto import data, nn

# A name is three ordinary words. Only the word before it tells that it begins, and what it is the name of: a person, a
# place or an organization. Tags are B- for its first word, I- for the others, and O outside of names.
WORDS = [f"word{number}" for number in range(40)]
CUES = {"PER": ("mr", "mrs", "dr"), "LOC": ("in", "near", "from"), "ORG": ("at", "join", "for")}
TAGS = ["O", *(f"{prefix}-{kind}" for kind in CUES for prefix in "BI")]
VOCABULARY = [*WORDS, *(cue for cues in CUES.values() for cue in cues)]
NOISE = 0.25  # of the words are replaced by any other, so neighbors have to be weighed against each other


def make_sentence(draw: random.Random) -> tuple[list[str], list[str]]:
    """Return words and their tags."""
    words, tags = [], []
    for _ in range(draw.randint(2, 4)):
        kind = draw.choice(list(CUES))
        plain, name = draw.choices(WORDS, k=draw.randint(1, 4)), draw.choices(WORDS, k=3)
        words += [*plain, draw.choice(CUES[kind]), *name]
        tags += ["O"] * (len(plain) + 1) + [f"B-{kind}", f"I-{kind}", f"I-{kind}"]
    return [draw.choice(VOCABULARY) if draw.random() < NOISE else word for word in words], tags


def make_rows(num_rows: int, seed: int) -> data.Items:
    draw = random.Random(seed)
    sentences = [make_sentence(draw) for _ in range(num_rows)]
    tokens = [np.array([VOCABULARY.index(word) for word in words]) for words, _ in sentences]
    tags = [np.array(tags) for _, tags in sentences]
    return data.from_arrays(tokens, tags, classes=TAGS)


def train(loss: nn.CRF | nn.CrossEntropy, num_rows: int, num_steps: int) -> float:
    """Train a tagger; return the F1 of the entities in sentences that it has not seen."""
    train_rows, valid_rows = make_rows(num_rows, 1), make_rows(500, 2)
    model = nn.Stack(
        [nn.Embedding(len(VOCABULARY), 32), nn.BidirectionalLSTM(32, 32), nn.Linear(64, len(TAGS))],
    )
    engine = stretto.make_engine(model, loss, seed=1)
    batches = data.Batches(train_rows, max_rows=32)
    for report in stretto.Trainer(engine, batches, stretto.TrainConfig(steps=num_steps, lr=1e-2)):
        if report.step % 50 == 0:
            print(f"{type(loss).__name__}: step {report.step}  loss {report.loss:.3f}")
    valid = data.Batches(valid_rows, max_rows=100)
    # A CRF is evaluated with the most likely tags of the whole sentence, cross-entropy with those of each word.
    return stretto.evaluate(engine, valid, metrics=["entity_f1"], class_names=valid_rows.labels).metrics["entity_f1"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a few steps")
    num_rows, num_steps = (100, 5) if parser.parse_args().quick else (1000, 200)
    scores = {
        "crf_f1": train(nn.CRF(len(TAGS)), num_rows, num_steps),
        "cross_entropy_f1": train(nn.CrossEntropy(), num_rows, num_steps),
    }
    print(f"entity F1: {scores['crf_f1']:.1%} with a CRF, {scores['cross_entropy_f1']:.1%} with cross-entropy")
    print(json.dumps(scores))
