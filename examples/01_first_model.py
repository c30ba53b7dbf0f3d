"""A first model: an LSTM language model on the text that the quick start prepared."""

import stretto
from stretto import nn
from stretto.data import Corpus, Lanes

train = Lanes(Corpus.open("data/python/train"), lanes=16, window=64)
valid = Lanes(Corpus.open("data/python/valid"), lanes=16, window=64)

model = nn.Stack(
    [
        nn.Embedding(256, 128),
        nn.LSTM(128, 128),
        nn.LockedDropout(0.1),
        nn.LSTM(128, 128),
        nn.Linear(128, 256),
    ]
)
engine = stretto.make_engine(model, nn.CrossEntropy(), seed=1)
trainer = stretto.Trainer(engine, train, stretto.TrainConfig(steps=300, lr=4e-3))

for report in trainer:
    if report.step % 50 == 0:
        print(f"step {report.step}  loss {report.loss:.3f}  {report.targets_per_second:,.0f} tokens/s")

scores = stretto.evaluate(engine, valid)
print(f"validation: {scores.perplexity:.2f} perplexity, {scores.bits_per_byte:.2f} bits per byte")
