from stretto.base.position import Position as Position
from stretto.base.task import Task as Task
from stretto.base.window import Window as Window
from stretto.prepare.inspection import Inspection as Inspection
from stretto.prepare.inspection import inspect_data as inspect_data
from stretto.prepare.prepare_data import PreparedData as PreparedData
from stretto.prepare.prepare_data import prepare_data as prepare_data
from stretto.prepare.prepare_sequences import prepare_sequences as prepare_sequences
from stretto.prepare.prepare_series import prepare_series as prepare_series
from stretto.prepare.prepare_text import prepare_text as prepare_text
from stretto.store.cache import Cache as Cache
from stretto.store.corpus import Corpus as Corpus
from stretto.store.sequences import Sequences as Sequences
from stretto.train.suggest import Suggestion as Suggestion
from stretto.train.suggest import suggest as suggest
from stretto.windows.batches import Batches as Batches
from stretto.windows.documents import DocumentLanes as DocumentLanes
from stretto.windows.forecast import Forecast as Forecast
from stretto.windows.items import LabeledItems as LabeledItems
from stretto.windows.items import NextTokenItems as NextTokenItems
from stretto.windows.items import SlidingWindows as SlidingWindows
from stretto.windows.lanes import Lanes as Lanes
from stretto.windows.loader import WindowSource as WindowSource
from stretto.windows.loader import read_ahead as read_ahead

__all__: list[str]
