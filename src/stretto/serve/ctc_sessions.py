"""CtcSessions: streams whose symbols are emitted as they are recognized."""

from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.state import State
from stretto.blocks.check_widths import find_num_outputs
from stretto.blocks.ctc_decoding import CtcBeamDecoder, CtcGreedyDecoder
from stretto.blocks.stack import Stack
from stretto.serve.sessions import SessionName, Sessions


class CtcSessions:
    """`Sessions` of a model that was trained with CTC: `feed` returns the symbols that each chunk adds.

    `names` are those of the model's outputs, of which 0 is the blank, as in `load_model(RUN).data_spec.labels`. Without
    `beam`, a symbol is emitted when it begins on the most likely path, and a session needs only the last one. With it,
    a symbol is emitted as soon as all hypotheses of the prefix beam search agree on it, often much later, and `close`
    returns the rest. For live text, leave `beam` out.
    """

    def __init__(self, stack: Stack, names: Sequence[str], beam: int | None = None) -> None:
        self._sessions = Sessions(stack)
        self._names, self._beam = tuple(names), beam
        self._make_decoder()  # raises if the beam is not allowed
        num_outputs = find_num_outputs(stack)
        if num_outputs not in (None, len(self._names)):
            raise self._wrong_names(num_outputs)
        self._decoders: dict[Hashable, CtcGreedyDecoder | CtcBeamDecoder] = {}

    def __len__(self) -> int:
        return len(self._decoders)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._decoders

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._decoders)

    @torch.no_grad()
    def feed(self, chunks: Mapping[SessionName, Tensor]) -> dict[SessionName, list[str]]:
        """Run each session's chunk, as `Sessions.feed` does; return the names of its new symbols by session."""
        outputs = self._sessions.feed(chunks)
        symbols: dict[SessionName, list[str]] = {}
        for name, y in outputs.items():
            if y.shape[-1] != len(self._names):  # of a user's own block, which was not known before
                for started in outputs:
                    self._sessions.close(started)
                raise self._wrong_names(y.shape[-1])
            decoder = self._decoders.setdefault(name, self._make_decoder())
            symbols[name] = self._named(decoder.add(y))
        return symbols

    def state(self, name: Hashable) -> State:
        """Return a copy of a session's state, as a batch of one row, for `restore`: the model's, then the decoder's."""
        model_state = self._sessions.state(name)
        return *model_state, *self._decoders[name].state()

    def restore(self, name: Hashable, state: State) -> None:
        """Set a new or existing session to what `state` returned, in this or another `CtcSessions` of the same model.

        Both must decode with a beam, or both without.
        """
        decoder = self._make_decoder()
        num_tensors = len(state) - decoder.num_state_tensors
        decoder.restore(state[max(0, num_tensors) :])
        self._sessions.restore(name, state[:num_tensors])
        self._decoders[name] = decoder

    @torch.no_grad()
    def close(self, name: Hashable) -> list[str]:
        """End a session if it exists; return the names of the symbols that were not emitted yet."""
        decoder = self._decoders.pop(name, None)
        if decoder is None:
            return []
        # With strided blocks, the last time steps may still wait for more.
        y = self._sessions.finish(name)
        labels = decoder.add(y) if len(y) else []
        return self._named([*labels, *decoder.finish()])

    def _wrong_names(self, num_outputs: int | None) -> ConfigError:
        return ConfigError(
            f"names has {len(self._names)} names, but the model has {num_outputs} outputs; give one name per output, "
            "the blank first"
        )

    def _make_decoder(self) -> CtcGreedyDecoder | CtcBeamDecoder:
        return CtcGreedyDecoder() if self._beam is None else CtcBeamDecoder(self._beam)

    def _named(self, labels: list[int]) -> list[str]:
        return [self._names[label] for label in labels]
