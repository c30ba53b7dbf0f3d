from stretto.base.state import State as State
from stretto.base.window import Rows as Rows
from stretto.blocks.bidirectional import BidirectionalLSTM as BidirectionalLSTM
from stretto.blocks.block import Block as Block
from stretto.blocks.dropout import Dropout as Dropout
from stretto.blocks.dropout import LockedDropout as LockedDropout
from stretto.blocks.initialize import initialize as initialize
from stretto.blocks.losses import AbsoluteError as AbsoluteError
from stretto.blocks.losses import BinaryCrossEntropy as BinaryCrossEntropy
from stretto.blocks.losses import CrossEntropy as CrossEntropy
from stretto.blocks.losses import HuberLoss as HuberLoss
from stretto.blocks.losses import Loss as Loss
from stretto.blocks.losses import LossSum as LossSum
from stretto.blocks.losses import QuantileLoss as QuantileLoss
from stretto.blocks.losses import SquaredError as SquaredError
from stretto.blocks.losses import last_step_targets as last_step_targets
from stretto.blocks.pointwise import Embedding as Embedding
from stretto.blocks.pointwise import LayerNorm as LayerNorm
from stretto.blocks.pointwise import Linear as Linear
from stretto.blocks.pointwise import Pointwise as Pointwise
from stretto.blocks.recurrent import GRU as GRU
from stretto.blocks.recurrent import LSTM as LSTM
from stretto.blocks.residual import Residual as Residual
from stretto.blocks.stack import Stack as Stack
from stretto.blocks.torch_losses import as_loss as as_loss

__all__: list[str]
