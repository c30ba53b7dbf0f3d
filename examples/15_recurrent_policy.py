"""Train a policy with memory: a cue at the start of a corridor says where to turn at its end.

    torchrun --nproc-per-node 2 examples/15_recurrent_policy.py

Corridors have 4 to 12 steps, so episodes end anywhere in a window. `Window.resets` says where: the state after that
time step is the initial one, in training as in the rollout. The last line is JSON: `success` is the share of the
last 1,000 or so episodes in which the policy turned the right way; without memory it is 0.5.
"""

import json
import time
from dataclasses import dataclass

import torch
from torch import Tensor

import stretto
from stretto import data, nn

NUM_LANES, NUM_STEPS, NUM_UPDATES = 32, 16, 90


@dataclass
class Corridors:
    """One corridor per lane. What the policy sees: the cue in the first step, and whether this is the last step."""

    random: torch.Generator

    def __post_init__(self) -> None:
        self.step, self.length, self.cue = (torch.zeros(NUM_LANES, dtype=torch.int64) for _ in range(3))
        self.start_again(torch.ones(NUM_LANES, dtype=torch.bool))

    def start_again(self, has_ended: Tensor) -> None:
        self.step[has_ended] = 0
        self.length[has_ended] = torch.randint(4, 13, (NUM_LANES,), generator=self.random)[has_ended]
        self.cue[has_ended] = torch.randint(2, (NUM_LANES,), generator=self.random)[has_ended]

    @property
    def is_last(self) -> Tensor:
        return self.step == self.length - 1

    def observe(self) -> Tensor:
        cue = torch.nn.functional.one_hot(self.cue, 2) * (self.step == 0).unsqueeze(1)
        return torch.cat([cue, self.is_last.unsqueeze(1)], dim=1).float()


def policy_gradient(logits: Tensor, turns: Tensor) -> nn.LossSum:
    """REINFORCE: targets `[time, batch, 2]` are an action and its reward; NaN where there is no turn to take."""
    is_turn = ~turns[..., 0].isnan()
    actions, rewards = turns[is_turn].unbind(1)
    log_probability = logits[is_turn].log_softmax(1).gather(1, actions.long().unsqueeze(1)).squeeze(1)
    return nn.LossSum(-(rewards * log_probability).sum(), is_turn.sum())


@torch.no_grad()
def play(model: nn.Stack, corridors: Corridors, lanes: Tensor, state: nn.State) -> tuple[data.Window, nn.State]:
    """Play one window in some lanes; return it, and the state after it."""
    inputs, targets, resets = [], [], []
    for _ in range(NUM_STEPS):
        inputs.append(corridors.observe())
        logits, state = model(inputs[-1].unsqueeze(0), state)
        actions = torch.multinomial(logits[0].softmax(1), 1, generator=corridors.random).squeeze(1)
        rewards = torch.where(actions == corridors.cue, 1.0, -1.0)
        has_ended = corridors.is_last
        targets.append(torch.stack([actions, rewards], dim=1).masked_fill(~has_ended.unsqueeze(1), torch.nan))
        resets.append(has_ended)
        rows = nn.Rows.of(NUM_LANES)
        state = model.begin(nn.Rows(lanes, rows.lengths, has_ended, 0, rows.device, rows.dtype), state)
        corridors.step += 1
        corridors.start_again(has_ended)
    lengths, fresh = torch.full((NUM_LANES,), NUM_STEPS), torch.zeros(NUM_LANES, dtype=torch.bool)
    tensors = (torch.stack(steps) for steps in (inputs, targets, resets))
    return data.Window(NUM_STEPS, lanes, lengths, fresh, *tensors), state


def main() -> None:
    started = time.perf_counter()
    with stretto.world() as world:
        model = nn.Stack([nn.LSTM(3, 32), nn.Linear(32, 2)])
        layout = stretto.Layout(replicas=world.size)
        engine = stretto.make_engine(model, policy_gradient, layout, world, seed=1)
        optimizer = torch.optim.Adam(engine.stack.parameters(), lr=0.01)
        corridors = Corridors(torch.Generator().manual_seed(world.rank))  # each replica plays in corridors of its own
        # Global indices: masks of dropout would depend on them.
        lanes = world.rank * NUM_LANES + torch.arange(NUM_LANES)
        state = engine.stack.initial_state(nn.Rows.of(NUM_LANES))
        right = torch.zeros(NUM_UPDATES, 2)
        for update in range(NUM_UPDATES):
            engine.stack.eval()
            window, state_after = play(engine.stack, corridors, lanes, state)
            result = engine.step(window, state, update)  # .grad is that of the sum over all replicas
            torch.testing.assert_close(result.state, state_after)  # what was trained is what was played
            for weight in engine.stack.parameters():
                assert weight.grad is not None
                weight.grad /= NUM_LANES * NUM_STEPS * world.size
            optimizer.step()
            state = state_after
            assert window.targets is not None
            rewards = window.targets[..., 1]
            right[update] = torch.tensor([(rewards > 0).sum(), (~rewards.isnan()).sum()])
            if world.rank == 0 and update % 30 == 29:
                share = right[update - 29 : update + 1].sum(0)
                print(f"update {update + 1:4}  success in {share[0] / share[1]:.1%} of {int(share[1])} episodes")
        share = right[-20:].sum(0)
        if world.rank == 0:
            figures = {"success": float(share[0] / share[1]), "seconds": time.perf_counter() - started}
            print(json.dumps(figures))


if __name__ == "__main__":
    main()
