"""The limit of open files: raised as far as it goes, and refused in a sentence where that is not enough."""

import resource
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from stretto.errors import MeshError
from stretto.mesh.file_limit import raise_file_limit


def _raise_limit(soft: int, hard: int, num_store_ranks: int) -> int | str:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        raise_file_limit(num_store_ranks)
    except MeshError as error:
        return str(error)
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_the_limit_of_open_files_is_raised_or_named() -> None:
    # Another process each: a hard limit can't be raised again.
    with ProcessPoolExecutor(1, get_context("fork"), max_tasks_per_child=None) as pool:
        assert pool.submit(_raise_limit, 256, 1200, 0).result() == 1200
        assert pool.submit(_raise_limit, 256, 1100, 280).result() == 1100
        assert pool.submit(_raise_limit, 256, 1000, 4096).result() == (
            "rank 0 needs up to 12,544 open files to host the key-value store of 4,096 ranks, but the limit is 1,000; "
            "raise the hard limit on its node (see ulimit -Hn)"
        )
