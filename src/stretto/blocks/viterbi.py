"""viterbi: the best tags of each row, given the scores of a linear-chain CRF."""

import torch
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.window import IGNORE_INDEX


@torch.no_grad()
def viterbi(
    emissions: Tensor, transitions: Tensor, start: Tensor, end: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the tags with the highest score, `[time, batch]`, and their scores, `[batch]`.

    The score of a row's tags is the sum of `emissions[t, row, tag]`, `[time, batch, tags]`, of
    `transitions[tag, next_tag]`, and of `start` and `end` of its first and last tag, each `[tags]`. `lengths` says how
    many time steps each row has; by default, all. After a row's end, tags are -100, as for targets that are missing.
    The score of a row without time steps is 0.
    """
    if emissions.dim() != 3:
        raise ConfigError(f"emissions have the shape {list(emissions.shape)}; use [time, batch, tags]")
    num_steps, num_rows, num_tags = emissions.shape
    if transitions.shape != (num_tags, num_tags) or start.shape != (num_tags,) or end.shape != (num_tags,):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (transitions, start, end))
        raise ConfigError(
            f"transitions, start and end have the shapes {shapes}, but emissions have {num_tags} tags; use "
            "[tags, tags], [tags] and [tags]"
        )
    device = emissions.device
    lengths = torch.full((num_rows,), num_steps, device=device) if lengths is None else lengths.to(device)
    tags = torch.full((num_steps, num_rows), IGNORE_INDEX, device=device)
    if not num_steps:
        return tags, emissions.new_zeros(num_rows)
    scores = start + emissions[0]  # [batch, tags]: of the best tags up to here that end in a tag
    best_before = []  # [batch, tags] for each time step but the first: the tag before, on the best way to a tag
    for step in range(1, num_steps):
        best, before = (scores.unsqueeze(2) + transitions).max(dim=1)
        is_running = (step < lengths).unsqueeze(1)
        scores = torch.where(is_running, best + emissions[step], scores)
        best_before.append(before)
    last_scores, last_tags = (scores + end).max(dim=1)
    current = last_tags
    for step in reversed(range(num_steps)):
        if step < num_steps - 1:
            # A row whose last time step is this one, or an earlier one, still has its last tag.
            came_from = best_before[step].gather(1, current.unsqueeze(1)).squeeze(1)
            current = torch.where(step + 1 < lengths, came_from, current)
        tags[step] = torch.where(step < lengths, current, IGNORE_INDEX)
    return tags, last_scores.where(lengths > 0, 0.0)
