"""A first model in twenty lines: an LSTM on the text that README's quickstart prepared."""

import stretto

train = stretto.Corpus.open("data/python/train")
valid = stretto.Corpus.open("data/python/valid")

model = stretto.Stack(
    [
        stretto.Embedding(256, 128),
        stretto.LSTM(128, 128),
        stretto.LockedDropout(0.1),
        stretto.LSTM(128, 128),
        stretto.Linear(128, 256),
    ]
)
engine = stretto.make_engine(model, stretto.TokenLoss(), seed=1)
trainer = stretto.Trainer(engine, stretto.Lanes(train, lanes=16, window=64), stretto.TrainConfig(steps=300, lr=4e-3))

for report in trainer:
    if report.step % 50 == 0:
        print(f"step {report.step}  loss {report.loss:.3f}  {report.tokens_per_second:,.0f} tokens/s")

scores = stretto.evaluate(engine, stretto.Lanes(valid, lanes=16, window=64))
print(f"held out: {scores.perplexity:.2f} perplexity, {scores.bits_per_byte:.2f} bits per byte")
