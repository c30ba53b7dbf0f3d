"""Small profiles, drawn by hypothesis or written by hand."""

from hypothesis import strategies as st

from stretto.plan.profile import AllReduceCost, CostPoint, KindCosts, Link, Profile, RankSpeed, SweepCosts, TiedBlocks
from stretto.plan.span_schedule import affine_sweeps


def kind(
    forward: float = 1e-3, backward: float = 2e-3, *, start: float = 0.0, weight_bytes: int = 1000,
    saved: float = 100.0, output_bytes: float = 8.0, accumulate: float = 0.0, optimizer: float = 0.0,
    fused: float | None = None, cast_bytes: float = 0.0,
) -> KindCosts:  # fmt: skip
    """A block that costs `start` per chunk, plus a share in proportion to rows and steps (of 8 x 16).

    In one call with the block before it, it costs the fraction `fused` of that.
    """
    points = [
        CostPoint(
            rows=rows,
            steps=steps,
            forward=start + forward * rows * steps / 128,
            backward=start + backward * rows * steps / 128,
            saved=saved * rows * steps / 128,
        )
        for rows in (1, 8)
        for steps in (1, 16)
    ]
    fused_points = [
        point.model_copy(update={name: fused * getattr(point, name) for name in ("forward", "backward", "saved")})
        for point in points
        if fused is not None
    ]
    return KindCosts(
        weight_bytes=weight_bytes, output_bytes=output_bytes, state_bytes=16, accumulate=accumulate,
        optimizer=optimizer, points=tuple(points), fused_points=tuple(fused_points), cast_bytes=cast_bytes,
    )  # fmt: skip


def profile(
    kinds: list[KindCosts], *, intra_node: Link | None = None, inter_node: Link | None = None, memory: float = 1e9,
    speeds: tuple[RankSpeed, ...] = (), all_reduces: tuple[AllReduceCost, ...] = (), overlap: float = 0.0,
    action_overhead: float = 0.0, fused_blocks: tuple[int, ...] = (), communicator_bytes: float = 0.0,
    tied: tuple[TiedBlocks, ...] = (),
) -> Profile:  # fmt: skip
    return Profile(
        device="test", memory=memory, kinds={str(index): kind for index, kind in enumerate(kinds)},
        blocks=tuple(str(index) for index in range(len(kinds))),
        loss=KindCosts(points=(CostPoint(rows=8, steps=16, forward=0, backward=0, saved=0),)),
        intra_node=intra_node or Link(latency=1e-6, bandwidth=1e10),
        inter_node=inter_node or Link(latency=1e-5, bandwidth=1e9),
        speeds=speeds, all_reduces=all_reduces, overlap=overlap, action_overhead=action_overhead,
        fused_blocks=fused_blocks, communicator_bytes=communicator_bytes, tied=tied,
    )  # fmt: skip


def with_fixed_cost(kind: KindCosts, share: float) -> KindCosts:
    """The same block, if `share` of what 8 rows cost did not depend on their number, as that of small products."""
    points = [
        point.model_copy(
            update={
                name: (share * 8 / point.rows + 1 - share) * getattr(point, name) for name in ("forward", "backward")
            }
        )
        for point in kind.points
    ]
    return kind.model_copy(update={"points": tuple(points)})


def bidirectional(profile: Profile, num_blocks: int | None = None) -> Profile:
    """The same profile, if each block, or each of the first `num_blocks`, were a bidirectional layer."""
    blocks = range(len(profile.blocks) if num_blocks is None else num_blocks)
    sweeps = tuple(
        SweepCosts(block=block, layer=block, is_reverse=is_reverse, state_bytes=16)
        for block in blocks
        for is_reverse in (False, True)
    )
    return profile.model_copy(update={"look_ahead_blocks": tuple(blocks), "sweeps": sweeps})


def affine(profile: Profile, num_blocks: int | None = None) -> Profile:
    """The same profile, if each block, or each of the first `num_blocks`, were an affine one such as a MinGRU."""
    blocks = range(len(profile.blocks) if num_blocks is None else num_blocks)
    sweeps = tuple(
        SweepCosts(
            block=block,
            layer=shape.layer,
            is_reverse=False,
            state_bytes=16,
            cost=shape.cost,
            passes_state=shape.passes_state,
        )
        for block in blocks
        for shape in affine_sweeps(3 * block)
    )
    return profile.model_copy(update={"sweeps": sweeps})


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Any small profile, with or without contention, fused blocks and a weight that its first and last block share."""
    seconds = st.floats(1e-6, 1e-2)
    kinds = [
        kind(
            draw(seconds), draw(seconds), start=draw(st.sampled_from([0.0, 1e-4])),
            weight_bytes=draw(st.integers(0, 10**7)), cast_bytes=draw(st.floats(0, 1e7)),
            saved=draw(st.floats(0, 1e6)),
            output_bytes=draw(st.floats(0, 1e4)), accumulate=draw(st.floats(0, 1e-3)), optimizer=draw(seconds),
            fused=draw(st.sampled_from([None, 0.1, 0.7])),
        )
        for _ in range(draw(st.integers(1, 5)))
    ]  # fmt: skip
    num_tied_bytes = draw(st.integers(0, min(kinds[0].weight_bytes, kinds[-1].weight_bytes)))
    tie = TiedBlocks(blocks=(0, len(kinds) - 1), weight_bytes=num_tied_bytes)
    speeds = draw(
        st.sampled_from(
            [
                (),
                (
                    RankSpeed(ranks=1, contended=1, solo=1),
                    RankSpeed(ranks=2, contended=0.9, solo=1),
                    RankSpeed(ranks=4, contended=0.4, solo=1),
                ),
            ]
        )
    )
    return profile(
        kinds, speeds=speeds, overlap=draw(st.sampled_from([0.0, 0.9])),
        action_overhead=draw(st.sampled_from([0.0, 1e-5])), memory=draw(st.sampled_from([1e9, 2e7])),
        fused_blocks=tuple(index for index in range(1, len(kinds)) if draw(st.booleans())),
        communicator_bytes=draw(st.sampled_from([0.0, 1e6])),
        tied=(tie,) if len(kinds) > 1 and draw(st.booleans()) else (),
    )  # fmt: skip
