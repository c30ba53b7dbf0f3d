"""LossScale: the factor that keeps the gradients of fp16 within its range."""

# Powers of two, so that scaling changes no digits. A loss is a sum over targets, not a mean, so 1 is a good start.
_INITIAL, _MIN, _MAX = 1.0, 2.0**-24, 2.0**24
_STEPS_TO_GROW = 2000


class LossScale:
    """Halves the scale after a step whose gradients overflow, and doubles it after 2,000 steps without overflow.

    The decision depends on sums over all ranks, so that all ranks have the same scale. In other precisions than fp16 it
    is always 1.
    """

    def __init__(self, *, is_dynamic: bool) -> None:
        self.is_dynamic = is_dynamic
        self.value = _INITIAL
        self.num_finite_steps = 0  # since the scale last changed

    def update(self, *, is_finite: bool) -> None:
        """Adapt the scale after a step."""
        if not self.is_dynamic:
            return
        if not is_finite:
            self.value, self.num_finite_steps = max(self.value / 2, _MIN), 0
            return
        self.num_finite_steps += 1
        if self.num_finite_steps == _STEPS_TO_GROW:
            self.value, self.num_finite_steps = min(self.value * 2, _MAX), 0

    def restore(self, value: float, num_finite_steps: int) -> None:
        """Continue from a checkpoint; it may be one of another precision, whose scale was 1."""
        if self.is_dynamic:
            self.value, self.num_finite_steps = value, num_finite_steps

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller scale may help after an overflow."""
        return self.is_dynamic and self.value > _MIN
