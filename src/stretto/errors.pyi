from stretto.base.errors import ConfigError as ConfigError
from stretto.base.errors import DataError as DataError
from stretto.base.errors import DivergedError as DivergedError
from stretto.base.errors import FencedError as FencedError
from stretto.base.errors import LawError as LawError
from stretto.base.errors import LostPeerError as LostPeerError
from stretto.base.errors import MeshError as MeshError
from stretto.base.errors import PlanError as PlanError
from stretto.base.errors import StrettoError as StrettoError
from stretto.prepare.file_listing import AmbiguousInputError as AmbiguousInputError
from stretto.train.events import PreemptedError as PreemptedError
from stretto.train.weight_check import CorruptionError as CorruptionError

__all__: list[str]
