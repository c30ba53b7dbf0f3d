"""A first model in twenty lines: an LSTM on the text that README's quickstart prepared."""

import stretto

train = stretto.data.Corpus.open("data/python/train")
valid = stretto.data.Corpus.open("data/python/valid")

model = stretto.nn.Stack(
    [
        stretto.nn.Embedding(256, 128),
        stretto.nn.LSTM(128, 128),
        stretto.nn.LockedDropout(0.1),
        stretto.nn.LSTM(128, 128),
        stretto.nn.Linear(128, 256),
    ]
)
engine = stretto.make_engine(model, stretto.nn.TokenLoss(), seed=1)
trainer = stretto.Trainer(
    engine, stretto.data.Lanes(train, lanes=16, window=64), stretto.TrainConfig(steps=300, lr=4e-3)
)

for report in trainer:
    if report.step % 50 == 0:
        print(f"step {report.step}  loss {report.loss:.3f}  {report.tokens_per_second:,.0f} tokens/s")

scores = stretto.evaluate(engine, stretto.data.Lanes(valid, lanes=16, window=64))
print(f"held out: {scores.perplexity:.2f} perplexity, {scores.bits_per_byte:.2f} bits per byte")
