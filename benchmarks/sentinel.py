"""Sentinel: what comparing the weights of two replicas costs, and the copies that a replay or a spike goes back to.

python benchmarks/sentinel.py [--quick]

Two replicas on this machine train; after each step they compare their checksums, with the copy that two replicas keep,
and without it. `hash_every = n` costs an n-th of this per step. The model is as large as in benchmarks/saving.py.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from saving import make_trainer
from stretto import Layout, World
from stretto.base.checksum import checksums
from stretto.train import WeightCheck
from timing import parse_quick, show

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.rank_pool import RankPool

Times = dict[str, list[float]]


def measure(world: World, hidden: int, rounds: int) -> tuple[Times, float]:
    """Return the seconds of a step, and of each part of a comparison after it; and the megabytes that are compared."""
    trainer = make_trainer(hidden, Layout(replicas=world.size), world)
    trainer.advance()
    check = WeightCheck(trainer)
    tensors = [shard.tensor for shard in trainer.shared_shards()]
    times: Times = {name: [] for name in ("step", "fingerprint", "checksums", "copy", "comparison")}
    actions: dict[str, Callable[[], object]] = {
        "step": trainer.advance,
        "fingerprint": check.add_step,
        "checksums": lambda: checksums(tensors, world.device),
        "copy": trainer.copy_state,
        "comparison": check.check,
    }
    for _ in range(rounds):
        for name, action in actions.items():
            world.barrier()
            started = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - started)
    return times, sum(tensor.nbytes for tensor in tensors) / 1e6


def main() -> None:
    is_quick = parse_quick(__doc__)
    hidden, rounds = (512, 6) if is_quick else (1024, 20)
    torch.set_num_threads(1)
    pool = RankPool(2)
    (times, megabytes), _ = pool.run(measure, hidden, rounds, seconds=300)
    pool.close()
    seconds = {name: median(values) for name, values in times.items()}
    rows = [
        [
            "a step",
            f"{1e3 * seconds['step']:.1f} ms",
            f"two replicas, {megabytes:.0f} MB to compare",
        ],
        ["a step's fingerprint", f"{1e3 * seconds['fingerprint']:.2f} ms", "with two replicas, in each step"],
        ["checksums", f"{1e3 * seconds['checksums']:.1f} ms", f"{megabytes / 1e3 / seconds['checksums']:.1f} GB/s"],
        ["a copy in memory", f"{1e3 * seconds['copy']:.1f} ms", "with two replicas, and for train.spike"],
        ["a comparison, and a copy", f"{1e3 * seconds['comparison']:.1f} ms", "checksums, two all-reduces, a copy"],
    ]
    figures = {f"{name}_over_step": seconds[name] / seconds["step"] for name in seconds if name != "step"}
    show("the sentinel's cost", ["what", "time", ""], rows, {"megabytes": megabytes, **figures})


if __name__ == "__main__":
    main()
