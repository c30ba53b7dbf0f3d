from stretto.checkpoint.background_save import SaveReport as SaveReport
from stretto.checkpoint.checkpoint import find_checkpoint as find_checkpoint
from stretto.checkpoint.snapshot import Snapshot as Snapshot

__all__: list[str]
