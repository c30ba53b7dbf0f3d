"""Decoding of CTC outputs: the labels that scores over time stand for, also while the time is running.

Each time step has a probability for every label and for the blank. A path, one symbol per time step, stands for the
labels that are left when repeated symbols are merged and blanks are removed: `a a - a b b -` is `a a b`.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.state import State

Labels = tuple[int, ...]


@dataclass(frozen=True)
class CtcHypothesis:
    """Labels, and the log of their probability: that of all paths in the beam that stand for them."""

    labels: Labels
    log_probability: float


def ctc_greedy(log_probs: Tensor | NDArray[Any], blank: int = 0) -> list[int]:
    """Return the labels of the most likely path. `log_probs` is `[time, labels]`, of one row; logits work as well."""
    return CtcGreedyDecoder(blank).add(log_probs)


def ctc_beam_search(log_probs: Tensor | NDArray[Any], beam: int = 16, blank: int = 0) -> list[CtcHypothesis]:
    """Return the `beam` most likely labellings, best first, by prefix beam search over `log_probs`, `[time, labels]`.

    A model's outputs can be given as they are, since `log_softmax` is applied, which does not change log-probabilities.
    The probability of a labelling is that of all its paths together. A beam wider than the number of labellings gives
    exact probabilities.
    """
    decoder = CtcBeamDecoder(beam, blank)
    emitted = tuple(decoder.add(log_probs))
    return [replace(hypothesis, labels=emitted + hypothesis.labels) for hypothesis in decoder.hypotheses]


class CtcGreedyDecoder:
    """Turns a stream of log-probabilities, or of logits, into the labels of the most likely path."""

    num_state_tensors = 1

    def __init__(self, blank: int = 0) -> None:
        self._blank = blank
        self._last = blank

    def add(self, log_probs: Tensor | NDArray[Any]) -> list[int]:
        """Return the labels that the next time steps add, `log_probs` being `[time, labels]`."""
        log_probs = _as_tensor(log_probs, self._blank)
        path = log_probs.argmax(dim=-1).tolist()
        pairs = zip(path, [self._last, *path], strict=False)
        labels = [label for label, before in pairs if label not in (before, self._blank)]
        self._last = path[-1] if path else self._last
        return labels

    def finish(self) -> list[int]:
        """Return the labels that were not returned yet: none. The decoder is then at the start of another row."""
        self._last = self._blank
        return []

    def state(self) -> State:
        """Return where the decoder is, for `restore`: the symbol of the last time step, int64 `[1]`."""
        return (torch.tensor([self._last]),)

    def restore(self, state: State) -> None:
        """Continue from what `state` returned."""
        _check_state(state, [(torch.int64, 1)])
        self._last = int(state[0])


class CtcBeamDecoder:
    """Prefix beam search over a stream of log-probabilities, or of logits.

    It emits a label as soon as all hypotheses agree on it.
    """

    num_state_tensors = 3

    def __init__(self, beam: int = 16, blank: int = 0) -> None:
        if beam < 1:
            raise ConfigError(f"beam={beam} is less than 1; use at least 1, such as 16")
        self._beam, self._blank = beam, blank
        self._start_row()

    def _start_row(self) -> None:
        # Hypotheses are the labels after those that were emitted. For each of them, the log of the probability of its
        # paths that end in a blank, and of those that end in its last label.
        self._prefixes: list[Labels] = [()]
        self._ends_in_blank, self._ends_in_label = np.zeros(1), np.full(1, -np.inf)
        self._last_emitted = self._blank

    @property
    def hypotheses(self) -> list[CtcHypothesis]:
        """The labels after those that were emitted, most likely first."""
        totals = np.logaddexp(self._ends_in_blank, self._ends_in_label)
        order = np.argsort(-totals, kind="stable")
        return [CtcHypothesis(self._prefixes[index], float(totals[index])) for index in order]

    def add(self, log_probs: Tensor | NDArray[Any]) -> list[int]:
        """Take the next time steps, `[time, labels]`; return the labels that are certain now within the beam."""
        log_probs = _as_tensor(log_probs, self._blank)
        log_probs = log_probs.detach().to("cpu", torch.float64).log_softmax(dim=-1)
        # NaN: all probabilities of a time step are zero.
        for frame in log_probs.nan_to_num(nan=-np.inf, neginf=-np.inf).numpy():
            self._step(frame)
        return self._emit(_common_length(self._prefixes))

    def finish(self) -> list[int]:
        """Return the rest of the most likely labels; the decoder is then at the start of another row."""
        labels = list(self.hypotheses[0].labels)
        self._start_row()
        return labels

    def state(self) -> State:
        """Return where the decoder is, for `restore`.

        That is the last label that was emitted, int64 `[1]`; the labels of each hypothesis, int64 `[1, beam, length]`,
        padded with -1; and the log of the probability of its paths that end in a blank and in a label, float64
        `[1, beam, 2]`.
        """
        length = max(map(len, self._prefixes))
        labels = [[*prefix, *[-1] * (length - len(prefix))] for prefix in self._prefixes]
        log_probabilities = np.stack([self._ends_in_blank, self._ends_in_label], axis=1)
        return (
            torch.tensor([self._last_emitted]),
            torch.tensor([labels], dtype=torch.int64),
            torch.from_numpy(log_probabilities).unsqueeze(0),
        )

    def restore(self, state: State) -> None:
        """Continue from what `state` returned; the beam may have another width."""
        _check_state(state, [(torch.int64, 1), (torch.int64, 3), (torch.float64, 3)])
        last, labels, log_probabilities = state
        self._last_emitted = int(last)
        self._prefixes = [tuple(label for label in row if label >= 0) for row in labels[0].tolist()]
        self._ends_in_blank, self._ends_in_label = log_probabilities[0].cpu().numpy().T.copy()

    def _step(self, frame: NDArray[np.float64]) -> None:
        """Take one time step: each prefix stays as it is, or gets one more label."""
        lasts = np.array([prefix[-1] if prefix else self._last_emitted for prefix in self._prefixes])
        totals = np.logaddexp(self._ends_in_blank, self._ends_in_label)
        rows = np.arange(len(lasts))
        stays_blank = totals + frame[self._blank]
        # Its last label once more, without a blank in between, is the same prefix.
        stays_label = self._ends_in_label + frame[lasts]
        grows = totals[:, None] + frame[None, :]
        grows[rows, lasts] = self._ends_in_blank + frame[lasts]
        grows[:, self._blank] = -np.inf
        # A prefix may also come from a shorter one that is in the beam.
        index_of = {prefix: index for index, prefix in enumerate(self._prefixes)}
        for index, prefix in enumerate(self._prefixes):
            shorter = index_of.get(prefix[:-1]) if prefix else None
            if shorter is not None:
                stays_label[index] = np.logaddexp(stays_label[index], grows[shorter, prefix[-1]])
                grows[shorter, prefix[-1]] = -np.inf
        self._choose(stays_blank, stays_label, grows)

    def _choose(
        self, stays_blank: NDArray[np.float64], stays_label: NDArray[np.float64], grows: NDArray[np.float64]
    ) -> None:
        """Keep the most likely prefixes."""
        num_prefixes, num_labels = grows.shape
        scores = np.concatenate([np.logaddexp(stays_blank, stays_label), grows.ravel()])
        best = np.argsort(-scores, kind="stable")[: self._beam]
        best = best[scores[best] > -np.inf]
        best = best if len(best) else np.array([0])  # all probabilities are zero: keep one prefix
        prefixes, blanks, labels = [], [], []
        for index in best.tolist():
            if index < num_prefixes:
                prefixes.append(self._prefixes[index])
                blanks.append(stays_blank[index])
                labels.append(stays_label[index])
            else:
                parent, label = divmod(index - num_prefixes, num_labels)
                prefixes.append((*self._prefixes[parent], label))
                blanks.append(-np.inf)
                labels.append(grows[parent, label])
        self._prefixes, self._ends_in_blank, self._ends_in_label = prefixes, np.array(blanks), np.array(labels)

    def _emit(self, count: int) -> list[int]:
        """Return the first `count` labels, which all prefixes share, and remove them."""
        labels = list(self._prefixes[0][:count])
        if labels:
            self._last_emitted = labels[-1]
            self._prefixes = [prefix[count:] for prefix in self._prefixes]
        return labels


def _common_length(prefixes: list[Labels]) -> int:
    """Return how many labels all prefixes begin with."""
    first, last = min(prefixes), max(prefixes)
    return next((index for index, label in enumerate(first) if label != last[index]), len(first))


def _check_state(state: State, expected: list[tuple[torch.dtype, int]]) -> None:
    """Raise unless a decoder's state has tensors of these dtypes and numbers of dims."""
    is_expected = [(tensor.dtype, tensor.dim()) for tensor in state] == expected
    if not is_expected or any(len(tensor) != 1 for tensor in state):
        shapes = ", ".join(f"{list(tensor.shape)} of {tensor.dtype}" for tensor in state)
        raise ConfigError(
            f"the decoder's state has the tensors {shapes or 'none'}; use a state of the same kind of decoder (with a "
            "beam, or without)"
        )


def _as_tensor(log_probs: Tensor | NDArray[Any], blank: int) -> Tensor:
    """Return `log_probs` as a Tensor; raise unless they are those of one row."""
    if not isinstance(log_probs, Tensor):
        log_probs = torch.from_numpy(np.array(log_probs))  # a copy: torch warns of arrays that are read-only
    if log_probs.dim() != 2:
        shape = list(log_probs.shape)
        raise ConfigError(f"log_probs has the shape {shape}, not [time, labels]; decode one row at a time")
    if not 0 <= blank < log_probs.shape[1]:
        num_labels = log_probs.shape[1]
        raise ConfigError(f"blank={blank} is not one of the {num_labels} outputs; use 0 to {num_labels - 1}")
    return log_probs
