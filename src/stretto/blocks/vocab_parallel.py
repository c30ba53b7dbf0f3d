"""VocabParallel: the embedding and the output layer of a model with one vocabulary, as a pair of blocks."""

from stretto.blocks.pointwise import Embedding, Linear
from stretto.blocks.weight_drop import WordDropEmbedding


class VocabParallel:
    """An embedding and an output layer over the same tokens; `tied` makes them use one table.

    Both blocks declare that ranks may split their tables by rows (`Block.num_table_rows`), and know nothing about
    ranks: with `layout.vocab_parallel`, the engine gives each stage its rows. `dropout` is that of WordDropEmbedding.

    Example:
        vocab = nn.VocabParallel(33_000, 512, tied=True)
        model = nn.Stack([vocab.embedding, nn.LSTM(512, 512), nn.LSTM(512, 512), vocab.head])
        engine = stretto.make_engine(model, nn.CrossEntropy(), Layout(stages=2, chunks=4, vocab_parallel=True), world)
    """

    def __init__(self, num_tokens: int, num_features: int, *, tied: bool = True, dropout: float = 0.0) -> None:
        self.embedding = (
            WordDropEmbedding(num_tokens, num_features, dropout) if dropout else Embedding(num_tokens, num_features)
        )
        self.head = Linear(num_features, num_tokens)
        if tied:
            self.head.module.weight = self.embedding.module.weight
