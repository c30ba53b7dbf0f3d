"""Use a trained model: generate text, stream three texts through it at once, score validation text.

stretto train examples/01_first_model.toml && python examples/08_use.py
"""

import torch

import stretto
from stretto.serve import Sampling, Sessions, generate, predict

trained = stretto.load_model("runs/first")
vocabulary = trained.data_spec.vocabulary
assert vocabulary is not None

print("".join(piece for (piece,) in generate(trained, "The import statement", 200, Sampling(0.7))))

# Each session takes its text in chunks of any length; all sessions run as rows of one batch.
texts = {
    "python": "A class definition is an executable statement.",
    "german": "Zwölf Boxkämpfer jagen Viktor quer über den Deich.",
    "noise": "xq9 zzk wvv 0f3 jjq",
}
tokens = {name: torch.from_numpy(vocabulary.encode(text).astype("int64")) for name, text in texts.items()}
sessions = Sessions(trained.stack)
losses = dict.fromkeys(texts, 0.0)
for start in range(0, 60, 7):
    chunks = {name: text[start : start + 7] for name, text in tokens.items() if start < len(text) - 1}
    for name, y in sessions.feed(chunks).items():
        targets = tokens[name][start + 1 : start + 8]
        losses[name] += float(torch.nn.functional.cross_entropy(y[: len(targets)], targets, reduction="sum"))
for name, loss in losses.items():
    print(f"{name}: {loss / (len(tokens[name]) - 1):.2f} nats per byte")

predictions = list(predict(trained, "data/python/valid"))
best = min(predictions, key=lambda prediction: prediction["loss"])
print(f"of {len(predictions)} pieces of validation text, the one at byte {best['start']:,} is the most predictable")
