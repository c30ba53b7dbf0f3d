"""Sections, pools and runs for stores that are far too small for them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from stretto.windows import batch_sizes, document_order, sections


@contextmanager
def small_sections(is_on: bool = True) -> Iterator[None]:
    """Cut even a small store into sections, and those into pools, groups and runs."""
    small = {
        sections: {"_MIN_SECTION_BYTES": 1, "_MIN_BATCHES": 1},
        batch_sizes: {
            "_BATCHES_PER_POOL": 2, "_SECTION_BATCHES_PER_POOL": 3, "_MIN_ROWS_PER_SECTION": 1, "_MIN_ROWS_PER_RUN": 1,
            "_MIN_SECTION_BATCHES_PER_POOL": 1, "_MIN_ROWS": 1, "_MIN_DENSITY": 0, "GROUP_BYTES": 2000,
            "_MAX_BATCH_EXCESS": 100,
        },
        document_order: {
            "_MIN_WINDOWS_PER_DOCUMENT": 0, "_MIN_DOCUMENTS_PER_SECTION": 1, "_MIN_LANES_PER_SECTION": 1,
            "WINDOWS_PER_POOL": 8, "GROUP_BYTES": 300,
        },
    }  # fmt: skip
    with ExitStack() as stack:
        for module, values in small.items() if is_on else ():
            for name, value in values.items():
                stack.enter_context(patch.object(module, name, value))
        yield
