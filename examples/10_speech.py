"""Recognize spoken digits: espeak-ng speaks them, an LSTM learns them with CTC, a WAV file is transcribed as it plays.

apt-get install espeak-ng               # or your system's package of that name
python examples/10_speech.py            # minutes on two cores; writes data/speech.pt, runs/speech and heard.wav
python examples/10_speech.py --quick    # few strings and steps, to see that everything works
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
import wave
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stretto
from stretto import data
from stretto.serve import CtcSessions
from stretto.train import EvaluationReport

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# A voice is an accent with a variant, which changes pitch and timbre. No variant of validation is heard in training.
ACCENTS = ("en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland")
TRAIN_VARIANTS = (
    *("m1", "m2", "m3", "m4", "m6", "m7", "f1", "f2", "f3", "f5", "Andy", "Annie", "Alex", "steph", "max", "Lee"),
    *("adam", "Alicia", "belinda", "benjamin", "boris", "david", "ed", "edward", "Gene", "iven", "john", "norbert"),
)
VALID_VARIANTS = ("m5", "f4", "Michael", "linda")

RATE, FFT, HOP, MELS = 22050, 512, 220, 40  # samples per second, and of a frame; frames are 10 ms apart
STACK = 3  # frames that the model joins to one time step
ROWS = Path("data/speech.pt")

Row = tuple[Tensor, list[str]]  # features and words


def main(quick: bool) -> None:
    if shutil.which("espeak-ng") is None:
        sys.exit("this example needs the program espeak-ng, which was not found; install the package espeak-ng")
    started = time.perf_counter()
    ROWS.parent.mkdir(exist_ok=True)
    num_train, num_valid = (40, 10) if quick else (3000, 500)
    torch.save((make_rows(num_train, TRAIN_VARIANTS, 1), make_rows(num_valid, VALID_VARIANTS, 2)), ROWS)
    print(f"{num_train:,} strings of digits to train on: {time.perf_counter() - started:.0f} s")

    shutil.rmtree("runs/speech", ignore_errors=True)
    error_rate, _ = stretto.spawn(train, 3 if quick else 900, ranks=2)
    print(f"{error_rate:.1%} of the words are wrong, in voices that training did not have")

    heard = Path("heard.wav")
    heard.write_bytes(speak(["three", "one", "four", "one", "five", "nine"], "en-us+f4", 160, 50))
    transcribe(stretto.load_model("runs/speech"), heard)
    print(json.dumps({"word_error_rate": error_rate, "seconds": time.perf_counter() - started}))


def speak(words: list[str], voice: str, speed: int, pitch: int) -> bytes:
    """Return a WAV file in which a voice speaks some words."""
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", " ".join(words)]
    return subprocess.run(command, check=True, capture_output=True).stdout


def read_wav(file: BytesIO) -> Tensor:
    """Return the samples of a WAV file with one channel of 16 bits, between -1 and 1."""
    with wave.open(file) as samples:
        assert (samples.getframerate(), samples.getnchannels(), samples.getsampwidth()) == (RATE, 1, 2)
        return torch.frombuffer(bytearray(samples.readframes(samples.getnframes())), dtype=torch.int16) / 2**15


def make_rows(num_rows: int, variants: tuple[str, ...], seed: int) -> list[Row]:
    """Return spoken strings of 3 to 7 digits, in random voices, with silence before them, and noise."""
    draw, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    texts = [draw.choices(DIGITS, k=draw.randint(3, 7)) for _ in range(num_rows)]
    voices = [f"{draw.choice(ACCENTS)}+{draw.choice(variants)}" for _ in texts]
    speeds, pitches = ([draw.randint(*limits) for _ in texts] for limits in ((120, 220), (30, 70)))
    with ThreadPoolExecutor(2) as threads:
        files = list(threads.map(speak, texts, voices, speeds, pitches))
    rows = []
    for words, file in zip(texts, files, strict=True):
        samples = torch.cat([torch.zeros(draw.randint(0, RATE // 4)), read_wav(BytesIO(file))])
        samples += torch.randn(len(samples), generator=noise) * 10 ** draw.uniform(-4, -2)
        rows.append((features(samples), words))
    return rows


def features(samples: Tensor) -> Tensor:
    """Return log-mel features `[time, MELS]`; samples at the end that don't fill a frame are left out."""
    spectrum = torch.stft(samples, FFT, HOP, window=torch.hann_window(FFT), center=False, return_complex=True)
    return (spectrum.abs().square().t() @ mel_filters()).clamp(min=1e-5).log() / 4 + 1  # about -2 to 2


def mel_filters() -> Tensor:
    """Return triangular filters, `[frequencies, MELS]`, whose centres are equally spaced on the mel scale."""
    low, high = (2595 * torch.tensor(1 + hertz / 700).log10() for hertz in (60, 8000))
    edges = 700 * (10 ** (torch.linspace(float(low), float(high), MELS + 2) / 2595) - 1)
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    frequencies = torch.linspace(0, RATE / 2, FFT // 2 + 1).unsqueeze(1)
    return torch.minimum((frequencies - left) / (centre - left), (right - frequencies) / (right - centre)).clamp(min=0)


def load_rows() -> tuple[data.Items, data.Items]:
    """Return the rows to train on and to validate with; every rank of the run calls this."""
    train, valid = (
        data.from_arrays(*map(list, zip(*rows, strict=True)), target_kind="sequence_per_row", classes=DIGITS)
        for rows in torch.load(ROWS)
    )
    return train, valid


def train(num_steps: int) -> float:
    """Train with CTC on all ranks, each with its share of every batch; return the word error rate of validation."""
    error_rate = float("nan")
    with stretto.world() as world:
        sections: dict[str, Any] = {
            "data": {"factory": f"{__file__}:load_rows", "max_rows": 32},
            "model": {"stack_frames": STACK, "layers": 2, "hidden": 128, "dropout": 0.2},
            "train": {"steps": num_steps, "lr": 3e-3, "warmup": min(20, num_steps)},
            "layout": {"replicas": world.size},
            "run": {"folder": "runs/speech", "device": "cpu"},
            "metrics": {"names": ["word_error_rate"]},
        }
        for event in stretto.Run(stretto.RunConfig(**sections), world).events():
            if world.is_rank_zero and isinstance(event, stretto.StepReport) and event.step % 100 == 0:
                print(f"step {event.step}  loss {event.loss:.3f}")
            if isinstance(event, EvaluationReport):
                error_rate = event.evaluation.metrics["word_error_rate"]
    return error_rate


def transcribe(model: stretto.TrainedModel, path: Path) -> None:
    """Print each word of a WAV file as soon as it is recognized; samples arrive in blocks of a tenth of a second."""
    sessions = CtcSessions(model.stack, model.data_spec.labels)
    heard = torch.zeros(0)
    for number, block in enumerate(torch.split(read_wav(BytesIO(path.read_bytes())), RATE // 10), 1):
        heard = torch.cat([heard, block])
        if len(heard) < FFT:
            continue
        inputs = features(heard)
        heard = heard[len(inputs) * HOP :]  # frames overlap: the next ones begin here
        for word in sessions.feed({path.name: inputs})[path.name]:
            print(f"after {number / 10:.1f} s: {word}")
    for word in sessions.close(path.name):
        print(f"at the end: {word}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="few strings and steps")
    main(parser.parse_args().quick)
