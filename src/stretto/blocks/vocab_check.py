"""check_vocab_parallel: whether the table of a model's output layer can be split over stages."""

from torch import nn

from stretto.base.errors import ConfigError
from stretto.blocks.cast_weights import has_hooks
from stretto.blocks.losses import CrossEntropy, Loss
from stretto.blocks.pointwise import Embedding, Linear
from stretto.blocks.stack import Stack
from stretto.blocks.weight_drop import WordDropEmbedding

_SETTING = "layout.vocab_parallel=true"


def check_vocab_parallel(model: Stack, loss: Loss, num_stages: int) -> CrossEntropy:
    """Return the loss if each stage can compute a part of the last block's outputs; raise if not."""
    last = model[-1]
    # Exact types only: a subclass may compute something else.
    is_plain = type(last) is Linear and type(last.module) is nn.Linear
    if not is_plain or has_hooks(last) or any(map(has_hooks, last.modules())):
        raise ConfigError(f"{_SETTING} needs a plain nn.Linear as last block, not {type(last).__name__}; leave it out")
    if type(loss) is not CrossEntropy or loss.class_weights or loss.label_smoothing:
        raise ConfigError(
            f"{_SETTING} needs CrossEntropy without class_weights and label_smoothing as loss; leave it out"
        )
    if (last.num_table_rows or 0) < num_stages:
        raise ConfigError(
            f"{_SETTING} can't split {last.num_table_rows} outputs over {num_stages} stages; leave it out"
        )
    prefix = f"blocks.{model.first + len(model) - 1}."
    is_tied = any(name.startswith(prefix) for pair in model.tied_names().items() for name in pair)
    if is_tied and not has_tied_table(model):
        raise ConfigError(
            f"{_SETTING} can split tied weights only if they are those of an Embedding without padding_idx, max_norm, "
            "scale_grad_by_freq and sparse, the first block, and of the output layer; leave it out"
        )
    return loss


def find_vocab_rows(model: Stack, loss: Loss) -> int:
    """Return how many rows of the last block's table stages can split; 0 if they can't split it."""
    try:
        check_vocab_parallel(model, loss, num_stages=1)
    except ConfigError:
        return 0
    return model[-1].num_table_rows or 0


def has_tied_table(model: Stack) -> bool:
    """Return whether the last block's table is that of an embedding, the first block, and of no other block."""
    first, last = f"blocks.{model.first}.module.weight", f"blocks.{model.first + len(model) - 1}.module.weight"
    tied = model.tied_names()
    users = [name for name, first_name in tied.items() if first_name == first]
    embedding = model[0]
    return (
        tied.get(last) == first
        and users == [last]
        and type(embedding) in (Embedding, WordDropEmbedding)
        and _is_plain_lookup(embedding.get_submodule("module"))
        and not any(map(has_hooks, embedding.modules()))
    )


def _is_plain_lookup(module: nn.Module) -> bool:
    """Return whether a module gives each token its row, and each row the sum of its tokens' gradients."""
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return False
    has_special_rows = module.padding_idx is not None or module.max_norm is not None
    return not (has_special_rows or module.scale_grad_by_freq or module.sparse)
