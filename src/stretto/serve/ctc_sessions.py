"""CtcSessions: streams whose symbols are emitted as they are recognized."""

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.blocks.ctc_decoding import CtcBeamDecoder, CtcGreedyDecoder
from stretto.blocks.stack import Stack
from stretto.serve.sessions import SessionName, Sessions


class CtcSessions:
    """`Sessions` of a model that was trained with CTC: `feed` returns the symbols that each chunk adds.

    `names` are those of the model's outputs, of which 0 is the blank, as in `load_model(RUN).data_spec.labels`. Without
    `beam`, a symbol is emitted when it begins on the most likely path, and a session needs only the last one. With it,
    a symbol is emitted as soon as all hypotheses of the prefix beam search agree on it, and `close` returns the rest.
    """

    def __init__(self, stack: Stack, names: Sequence[str], beam: int | None = None) -> None:
        self._sessions = Sessions(stack)
        self._names, self._beam = tuple(names), beam
        self._make_decoder()  # raises if the beam is not allowed
        self._decoders: dict[Hashable, CtcGreedyDecoder | CtcBeamDecoder] = {}

    def __len__(self) -> int:
        return len(self._decoders)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._decoders

    @torch.no_grad()
    def feed(self, chunks: Mapping[SessionName, Tensor]) -> dict[SessionName, list[str]]:
        """Run each session's chunk, as `Sessions.feed` does; return the names of its new symbols by session."""
        symbols: dict[SessionName, list[str]] = {}
        for name, y in self._sessions.feed(chunks).items():
            if y.shape[-1] != len(self._names):
                raise ConfigError(
                    f"names has {len(self._names)} names, but the model has {y.shape[-1]} outputs; give one name per "
                    "output, the blank first"
                )
            decoder = self._decoders.setdefault(name, self._make_decoder())
            symbols[name] = self._named(_add(decoder, y))
        return symbols

    @torch.no_grad()
    def close(self, name: Hashable) -> list[str]:
        """End a session if it exists; return the names of the symbols that were not emitted yet."""
        decoder = self._decoders.pop(name, None)
        if decoder is None:
            self._sessions.close(name)
            return []
        # With strided blocks, the last time steps may still wait for more.
        y = self._sessions.finish(name)
        labels = _add(decoder, y) if len(y) else []
        return self._named([*labels, *decoder.finish()])

    def _make_decoder(self) -> CtcGreedyDecoder | CtcBeamDecoder:
        return CtcGreedyDecoder() if self._beam is None else CtcBeamDecoder(self._beam)

    def _named(self, labels: list[int]) -> list[str]:
        return [self._names[label] for label in labels]


def _add(decoder: CtcGreedyDecoder | CtcBeamDecoder, y: Tensor) -> list[int]:
    return decoder.add(y.float().log_softmax(dim=-1))
