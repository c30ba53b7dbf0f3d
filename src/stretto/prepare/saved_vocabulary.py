"""SavedVocabulary: a vocabulary in the job's folder, so that tasks, which are sent with each part, stay small."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from stretto.prepare.part_runner import PartResult
from stretto.prepare.prepare_job import Job
from stretto.prepare.work_folder import WorkFolder
from stretto.store.vocabulary import Vocabulary, parse_vocabulary, vocabulary_bytes

_PREFIX = "vocabulary"


@dataclass(frozen=True)
class SavedVocabulary:
    """The name of a vocabulary's file, which is a hash of its content."""

    name: str

    def open(self, folder: WorkFolder) -> Vocabulary:
        """Return the vocabulary, which each process reads once, however many parts it prepares."""
        return _read(folder, self.name)


def save_vocabulary(job: Job, make: Callable[[], Vocabulary]) -> SavedVocabulary:
    """Save the vocabulary that `make` returns; on several ranks, only rank 0 calls it."""

    def save() -> PartResult:
        content = vocabulary_bytes(make())
        name = f"parts/{_PREFIX}.{hashlib.sha256(content).hexdigest()}"
        job.folder.write(name, content)
        return {"name": name}

    return SavedVocabulary(job.once(_PREFIX, save)["name"])


@lru_cache(maxsize=2)
def _read(folder: WorkFolder, name: str) -> Vocabulary:
    return parse_vocabulary(folder.read(name), f"{folder.location}/{name}")
