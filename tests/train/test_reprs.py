"""What Run, Trainer, Engine and Evaluation show at a prompt: one line each, without tensors."""

from pathlib import Path

import torch

from helpers.rank_pool import RankPools
from stretto import Layout, Run, Trainer, World, evaluate, make_engine
from stretto.config.toml import parse_config
from stretto.config.train import TrainConfig
from stretto.data import Batches, Corpus, from_arrays
from stretto.nn import GRU, CrossEntropy, Linear, Stack


def make_trainer(world: World, layout: Layout) -> Trainer:
    with torch.device("meta"):
        model = Stack([GRU(3, 4), Linear(4, 2)])
    rows = from_arrays(torch.randn(8, 5, 3), [0, 1] * 4)
    engine = make_engine(model, CrossEntropy(), layout, world, seed=1)
    return Trainer(engine, Batches(rows, max_rows=4), TrainConfig(steps=4, warmup=0))


def test_one_line_says_what_it_is_and_how_far() -> None:
    trainer = make_trainer(World(0, 1, torch.device("cpu")), Layout())
    trainer.advance()
    engine = "PipelineEngine(one rank, 2 blocks, 118 weights, cpu, fp32)"
    assert repr(trainer.engine) == engine
    assert repr(trainer) == f"Trainer(step 1 of 4, AdamW, {engine})"
    rows = from_arrays(torch.randn(8, 5, 3), [0, 1] * 4)
    evaluation = evaluate(trainer.engine, Batches(rows, max_rows=4))
    assert repr(evaluation) == f"Evaluation(loss {evaluation.loss:.4f}  accuracy {evaluation.accuracy:.4f}  (8 labels))"


def describe(world: World) -> str:
    return repr(make_trainer(world, Layout(replicas=2)).engine)


def test_an_engine_names_its_rank(pools: RankPools) -> None:
    assert pools[2].run(describe) == [
        f"ReplicaEngine(rank {rank} of 2 (replica {rank}, stage 0), 2 blocks, 118 weights, cpu, fp32)"
        for rank in range(2)
    ]


def test_a_run_names_its_folder(byte_corpus: Corpus, tmp_path: Path) -> None:
    data = {"train": byte_corpus.location, "lanes": 4, "window": 8}
    run = Run(parse_config({"data": data, "model": {"hidden": 4}, "run": {"folder": str(tmp_path / "run")}}))
    assert repr(run).startswith(f"Run('{tmp_path}/run', step 0, one device")
    run.close()
