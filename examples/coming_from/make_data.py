"""The data of these guides: texts.jsonl, book.txt and series.npz.

python examples/coming_from/make_data.py    # from Python's own manual, and random numbers
"""

import json
import pydoc_data.topics
from pathlib import Path

import numpy as np

words = " ".join(" ".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore").decode().split())

start = 0
with Path("texts.jsonl").open("w") as file:
    for number in range(160):
        # Short ones and long ones: 8 to 206 letters.
        length = 8 + 198 * (number * number % 97) ** 3 // 96**3
        file.write(json.dumps({"text": words[start : start + length]}) + "\n")
        start += length

# One long text: sixteen streams of 640 steps, and the letter after the last.
Path("book.txt").write_text(words[: 16 * 640 + 1])

# Arrays: x [rows, time, channels] -> y [rows, values].
draw = np.random.default_rng(1)
x = draw.normal(size=(256, 64, 8)).astype(np.float32)
y = (x[:, -4:].mean(axis=1) @ draw.normal(size=(8, 3))).astype(np.float32)
np.savez("series.npz", x=x, y=y)
