"""Writes token ids to Parquet with other tools, in a Python that has them: `python write_parquet.py TOOL FOLDER`.

The rows are in `FOLDER/rows.json`; each has `tokens`. It does not import stretto, which need not be installed there.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def write_ray(rows: Rows, folder: Path) -> None:
    """As lists, and as arrays, which Ray Data writes as tensors: of the same shape, or of different ones."""
    import numpy as np
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    ray.data.from_items(rows).repartition(3).write_parquet(str(folder / "lists"))

    def to_arrays(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "tokens": np.array(row["tokens"], np.int32)}

    ray.data.from_items(rows).map(to_arrays).write_parquet(str(folder / "arrays"))
    ray.data.from_items(rows, override_num_blocks=1).map(to_arrays).write_parquet(str(folder / "ragged"))

    def to_equal(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "tokens": np.array([*row["tokens"], 0, 0, 0, 0][:4], np.uint16)}

    ray.data.from_items(rows).map(to_equal).write_parquet(str(folder / "equal"))
    ray.shutdown()


def write_spark(rows: Rows, folder: Path) -> None:
    """With the usual types, and as old readers expect it."""
    from pyspark.sql import SparkSession
    from pyspark.sql.types import ArrayType, IntegerType, LongType, StructField, StructType

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    for name, legacy, kind in (
        ("int", "false", IntegerType()),
        ("long", "false", LongType()),
        ("legacy", "true", IntegerType()),
    ):
        spark.conf.set("spark.sql.parquet.writeLegacyFormat", legacy)
        schema = StructType([StructField("id", LongType()), StructField("tokens", ArrayType(kind))])
        values = [(row["id"], row["tokens"]) for row in rows]
        spark.createDataFrame(values, schema).coalesce(1).write.parquet(str(folder / name))
    spark.stop()


def write_datatrove(rows: Rows, folder: Path) -> None:
    """The tokens are metadata of documents."""
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.writers import ParquetWriter

    def read(data: object, rank: int, world_size: int) -> Iterator[Document]:
        for row in rows[rank::world_size]:
            yield Document(text="a document", id=str(row["id"]), metadata={"tokens": row["tokens"]})

    pipeline = [read, ParquetWriter(str(folder / "documents"), expand_metadata=True)]
    LocalPipelineExecutor(pipeline, tasks=2, logging_dir=str(folder / "logs")).run()


if __name__ == "__main__":
    tool, target = sys.argv[1], Path(sys.argv[2])
    {"ray": write_ray, "spark": write_spark, "datatrove": write_datatrove}[tool](
        json.loads((target / "rows.json").read_text()), target
    )
