"""Random pauses, so that many ranks that wait for one server do not all ask it at the same moment."""

import random

# Not the global generator, whose numbers belong to the user's code, and not a seeded one: forked data workers would
# draw the same numbers.
_random = random.SystemRandom()


def jitter(seconds: float) -> float:
    """Return a random pause of half to one and a half times `seconds`."""
    return seconds * _random.uniform(0.5, 1.5)
