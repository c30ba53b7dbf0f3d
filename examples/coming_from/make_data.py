"""The data of these guides: texts.jsonl, 160 texts of unequal length, and book.txt, one long text.

python examples/coming_from/make_data.py    # here, from Python's own manual
"""

import json
import pydoc_data.topics
from pathlib import Path

words = " ".join(" ".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore").decode().split())

start = 0
with Path("texts.jsonl").open("w") as file:
    for number in range(160):
        # Short ones and long ones: 8 to 206 letters.
        length = 8 + 198 * (number * number % 97) ** 3 // 96**3
        file.write(json.dumps({"text": words[start : start + length]}) + "\n")
        start += length

# Sixteen streams of 640 steps, and the letter after the last.
Path("book.txt").write_text(words[: 16 * 640 + 1])
