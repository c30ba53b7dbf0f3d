from stretto.engine.local import LocalEngine as LocalEngine
from stretto.measure.laws import ChunkReport as ChunkReport
from stretto.measure.laws import check_chunk_law as check_chunk_law
from stretto.measure.laws import check_loss as check_loss
from stretto.measure.verify import Verification as Verification
from stretto.measure.verify import verify as verify

__all__: list[str]
