from stretto import checkpoint as checkpoint
from stretto import data as data
from stretto import errors as errors
from stretto import exchange as exchange
from stretto import launch as launch
from stretto import nn as nn
from stretto import parallel as parallel
from stretto import plan as plan
from stretto import report as report
from stretto import serve as serve
from stretto import testing as testing
from stretto import train as train
from stretto.base.errors import StrettoError as StrettoError
from stretto.checkpoint.checkpoint import Checkpoint as Checkpoint
from stretto.checkpoint.manager import CheckpointManager as CheckpointManager
from stretto.config.layout import Layout as Layout
from stretto.config.run import RunConfig as RunConfig
from stretto.config.toml import load_config as load_config
from stretto.config.train import TrainConfig as TrainConfig
from stretto.engine.build import make_engine as make_engine
from stretto.engine.engine import Engine as Engine
from stretto.engine.engine import StepResult as StepResult
from stretto.launch.spawn_ranks import spawn as spawn
from stretto.mesh.join import world as world
from stretto.mesh.world import World as World
from stretto.parallel.clip import clip_grad_norm_ as clip_grad_norm_
from stretto.parallel.mean import global_mean as global_mean
from stretto.parallel.module import parallelize as parallelize
from stretto.parallel.split import full_state_dict as full_state_dict
from stretto.parallel.verify import verify as verify
from stretto.planning.choose import choose_layout as choose_layout
from stretto.train.evaluate import Evaluation as Evaluation
from stretto.train.evaluate import evaluate as evaluate
from stretto.train.run import Run as Run
from stretto.train.trained_model import TrainedModel as TrainedModel
from stretto.train.trained_model import load_model as load_model
from stretto.train.trainer import StepReport as StepReport
from stretto.train.trainer import Trainer as Trainer

__version__: str

__all__: list[str]
