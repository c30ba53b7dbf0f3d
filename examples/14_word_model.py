"""A word model by the recipe of the AWD-LSTM, against a plain LSTM that trains for the same time.

python examples/14_word_model.py [FOLDER [SECONDS]]    # wikitext-2's valid.txt and test.txt; 240 seconds per model

It trains on valid.txt and scores test.txt, which together are wikitext-2-small. The last line is JSON.
"""

import json
import sys
import time
from pathlib import Path

import stretto
from stretto import nn
from stretto.data import Corpus, Lanes, TextOptions, prepare_text

default = Path(__file__).resolve().parents[2] / "shared" / "data" / "wikitext-2"
folder = Path(sys.argv[1]) if sys.argv[1:] else default
seconds = float(sys.argv[2]) if sys.argv[2:] else 240.0
if not (folder / "valid.txt").exists():
    sys.exit("pass the folder with wikitext-2's valid.txt and test.txt")

if not Path("data/words").exists():
    prepare_text(folder / "valid.txt", "data/words/train", TextOptions(level="word", max_symbols=4000))
    prepare_text(folder / "test.txt", "data/words/test", TextOptions(vocabulary="data/words/train"))
train, test = (Lanes(Corpus.open(f"data/words/{part}"), lanes=16, window=35) for part in ("train", "test"))
num_words, width = train.task.num_inputs, 200


def plain_model() -> nn.Stack:
    vocab = nn.VocabParallel(num_words, width, tied=False)
    return nn.Stack([vocab.embedding, nn.LSTM(width, width), nn.LSTM(width, width), vocab.head])


def awd_model() -> nn.Stack:
    """Tied weights, and dropout of words, of features (the same in a whole window) and of recurrent weights."""
    vocab = nn.VocabParallel(num_words, width, tied=True, dropout=0.1)
    return nn.Stack(
        [
            vocab.embedding,
            nn.LockedDropout(0.3),
            nn.WeightDropLSTM(width, width, probability=0.3),
            nn.LockedDropout(0.2),
            nn.WeightDropLSTM(width, width, probability=0.3),
            nn.ActivationPenalty(width, temporal=1.0),
            nn.LockedDropout(0.3),
            nn.ActivationPenalty(width, activation=2.0),
            vocab.head,
        ]
    )


def best_perplexity(name: str, model: nn.Stack, config: stretto.TrainConfig) -> tuple[float, float]:
    """Train for some time, and score each epoch; return the lowest perplexity, and bits per byte then."""
    engine = stretto.make_engine(model, nn.CrossEntropy(), seed=1)
    trainer = stretto.Trainer(engine, train, config)
    best, spent = (float("inf"), float("inf")), 0.0
    while spent < seconds:
        started, epoch = time.perf_counter(), trainer.position.epoch
        while trainer.position.epoch == epoch and spent + time.perf_counter() - started < seconds:
            trainer.advance()
        spent += time.perf_counter() - started
        with trainer.averaged_weights():
            scores = stretto.evaluate(engine, test)
        best = min(best, (scores.perplexity, scores.bits_per_byte or 0.0))
        print(f"{name}: {trainer.step} steps, {spent:.0f} s, perplexity {scores.perplexity:.1f}")
    return best


constant = stretto.TrainConfig(epochs=1000, lr=2e-3, schedule="constant", clip=0.25)
averaged = constant.model_copy(update={"average": "ema", "average_decay": 0.995})
plain, plain_bits = best_perplexity("plain", plain_model(), constant)
awd, awd_bits = best_perplexity("AWD-LSTM", awd_model(), averaged)
result = {"plain_perplexity": plain, "awd_perplexity": awd, "plain_bits": plain_bits, "awd_bits": awd_bits}
print(json.dumps({name: round(value, 3) for name, value in result.items()} | {"seconds": seconds}))
