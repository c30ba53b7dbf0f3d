"""Use a trained model: write text, stream many texts through it at once, score held-out text.

stretto train examples/01_first_model.toml && python examples/08_use.py
"""

import torch

import stretto

trained = stretto.load_model("runs/first")
vocabulary = trained.data_spec.vocabulary
assert vocabulary is not None

print(
    "".join(
        piece for (piece,) in stretto.serve.generate(trained, "The import statement", 200, stretto.serve.Sampling(0.7))
    )
)

# Each session is fed as its text comes in, a chunk of any length at a time; together they share the network's calls.
texts = {
    "python": "A class definition is an executable statement.",
    "german": "Zwölf Boxkämpfer jagen Viktor quer über den Deich.",
    "noise": "xq9 zzk wvv 0f3 jjq",
}
tokens = {name: torch.from_numpy(vocabulary.encode(text).astype("int64")) for name, text in texts.items()}
sessions = stretto.serve.Sessions(trained.stack)
losses = dict.fromkeys(texts, 0.0)
for start in range(0, 60, 7):
    chunks = {name: text[start : start + 7] for name, text in tokens.items() if start < len(text) - 1}
    for name, y in sessions.feed(chunks).items():
        targets = tokens[name][start + 1 : start + 8]
        losses[name] += float(torch.nn.functional.cross_entropy(y[: len(targets)], targets, reduction="sum"))
for name, loss in losses.items():
    print(f"{name}: {loss / (len(tokens[name]) - 1):.2f} nats a byte")

answers = list(stretto.serve.predict(trained, "data/python/valid"))
best = min(answers, key=lambda answer: answer["loss"])
print(f"{len(answers)} stretches of held-out text; the one from byte {best['start']:,} on is the most predictable")
