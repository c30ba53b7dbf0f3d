"""Chunks around a bidirectional layer, compared with one chunk for the whole model, measured and simulated.

    python benchmarks/look_ahead.py [--quick]

The model has the shape of GNMT's encoder: one bidirectional LSTM layer, then seven causal ones, on 2 stages.
"""

import argparse

from paused_pools import PausedPools
from stretto import Layout, World, make_engine
from stretto.engine.build import stage_parts
from stretto.engine.pipeline import PipelineEngine
from stretto.nn import LSTM, BidirectionalLSTM, Stack, initialize
from stretto.plan.actions import Action
from stretto.plan.draw import draw_text
from stretto.plan.run_chain import cut_at_look_ahead
from stretto.plan.schedule import chain_schedule
from stretto.plan.simulator import simulate
from stretto.plan.timeline import TimedAction, Timeline
from timing import show
from wavefront import Contender, Shape, Step, Turn, best_seconds, measure, plain_loss, window

NUM_CAUSAL = 7


def model(shape: Shape) -> Stack:
    first = BidirectionalLSTM(shape.hidden, shape.hidden // 2)
    return initialize(Stack([first, *(LSTM(shape.hidden, shape.hidden) for _ in range(NUM_CAUSAL))]), seed=1)


def step(world: World, shape: Shape, layout: Layout) -> Step:
    engine, batch = make_engine(model(shape), plain_loss, layout, world), window(shape)
    assert isinstance(engine, PipelineEngine)

    def run() -> list[TimedAction]:
        engine.recorder.start()
        engine.step(batch, None, 0)
        return engine.recorder.stop()

    return run


def simulated(turn: list[Turn], shape: Shape, layout: Layout) -> Timeline:
    """Simulate a step with the measured times of its actions; messages take no time."""
    costs = {(timed.stage, timed.action): timed.stop - timed.start for rank in turn for timed in rank.timed_actions}
    stack = model(shape)
    looks_ahead = [layout.chunks > 1 and not block.causal for block in stack]
    chain, _ = cut_at_look_ahead(stage_parts(stack, layout), looks_ahead, layout.stages)
    schedules = [chain_schedule(chain, stage, 1, layout.chunks) for stage in range(layout.stages)]

    def cost(stage: int, action: Action) -> float:
        return costs[stage, action]

    return simulate(schedules, cost, chain=chain)


def main() -> None:
    parser = argparse.ArgumentParser(description="Chunks around a bidirectional layer compared with one chunk.")
    parser.add_argument("--quick", action="store_true", help="finish within a minute, with coarser figures")
    options = parser.parse_args()
    shape = Shape(hidden=256, rows=16, window=64 if options.quick else 256)
    layouts = {f"{count} chunks": Layout(stages=2, chunks=count) for count in (1, 4, 8)}
    listed = [Contender(name, 2, step, (shape, layout)) for name, layout in layouts.items()]
    pools = PausedPools()
    turns = measure(listed, pools, 2 if options.quick else 8)
    pools.close()
    seconds = {name: best_seconds(turns[name]) for name in layouts}
    timelines = {name: [simulated(turn, shape, layout) for turn in turns[name]] for name, layout in layouts.items()}
    # Of the fastest turn, like the measured seconds.
    predicted = {name: min(line.seconds for line in lines) for name, lines in timelines.items()}
    best = min(layouts, key=lambda name: seconds[name])
    print(draw_text(timelines[best][-1]))
    show(
        f"1 bidirectional and {NUM_CAUSAL} causal LSTM layers on 2 stages, H={shape.hidden}, {shape.rows} rows, "
        f"window {shape.window}, fp32, gloo",
        ["layout", "seconds per step", "simulated"],
        [[name, f"{value:.3f}", f"{predicted[name]:.3f}"] for name, value in seconds.items()],
        {
            "chunks_over_one_chunk": seconds["1 chunks"] / seconds[best],
            "simulated_chunks_over_one_chunk": predicted["1 chunks"] / predicted[best],
        },
    )


if __name__ == "__main__":
    main()
