"""What type checkers see of the names that `__init__.py` imports on first use."""

from stretto.base.errors import ConfigError as ConfigError
from stretto.base.errors import DataError as DataError
from stretto.base.errors import DivergedError as DivergedError
from stretto.base.errors import LawError as LawError
from stretto.base.errors import StrettoError as StrettoError
from stretto.base.state import State as State
from stretto.base.window import Rows as Rows
from stretto.base.window import Window as Window
from stretto.blocks.bidirectional import BidirectionalLSTM as BidirectionalLSTM
from stretto.blocks.block import Block as Block
from stretto.blocks.dropout import Dropout as Dropout
from stretto.blocks.dropout import LockedDropout as LockedDropout
from stretto.blocks.initialize import initialize as initialize
from stretto.blocks.losses import AbsoluteError as AbsoluteError
from stretto.blocks.losses import Loss as Loss
from stretto.blocks.losses import LossSum as LossSum
from stretto.blocks.losses import QuantileLoss as QuantileLoss
from stretto.blocks.losses import SequenceLoss as SequenceLoss
from stretto.blocks.losses import SquaredError as SquaredError
from stretto.blocks.losses import TokenLoss as TokenLoss
from stretto.blocks.losses import last_step_targets as last_step_targets
from stretto.blocks.pointwise import Embedding as Embedding
from stretto.blocks.pointwise import LayerNorm as LayerNorm
from stretto.blocks.pointwise import Linear as Linear
from stretto.blocks.pointwise import Pointwise as Pointwise
from stretto.blocks.recurrent import GRU as GRU
from stretto.blocks.recurrent import LSTM as LSTM
from stretto.blocks.residual import Residual as Residual
from stretto.blocks.stack import Stack as Stack
from stretto.config.run import RunConfig as RunConfig
from stretto.config.toml import load_config as load_config
from stretto.config.train import TrainConfig as TrainConfig
from stretto.data.corpus import Corpus as Corpus
from stretto.data.lanes import Lanes as Lanes
from stretto.data.prepare import prepare_text as prepare_text
from stretto.engine.local import LocalEngine as LocalEngine
from stretto.train.evaluate import Evaluation as Evaluation
from stretto.train.evaluate import evaluate as evaluate
from stretto.train.run import Run as Run
from stretto.train.run import load_run as load_run
from stretto.train.trainer import StepReport as StepReport
from stretto.train.trainer import Trainer as Trainer

__all__: list[str]
__version__: str
