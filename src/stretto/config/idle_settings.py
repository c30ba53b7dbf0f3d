"""idle_settings: the settings of a run that have no effect in its layout.

They are no errors: the number of ranks may come from the planner (`layout.auto`) or the launcher (`layout.elastic`).
"""

from stretto.config.run import RunConfig


def idle_settings(config: RunConfig) -> list[str]:
    """Return a sentence for each setting that has no effect in the config's layout."""
    layout, hash_every = config.layout, config.sentinel.hash_every
    sentences = []
    if hash_every is not None and layout.replicas * layout.spans == 1:
        sentences.append(
            f"sentinel.hash_every={hash_every} has no effect: no two ranks hold the same blocks; use several replicas, "
            "or leave it out"
        )
    if layout.interleave > 1 and layout.stages == 1:
        sentences.append(
            f"layout.interleave={layout.interleave} has no effect on one stage; use several stages, or leave it out"
        )
    if layout.vocab_parallel and layout.stages == 1:
        sentences.append("layout.vocab_parallel=true has no effect on one stage; use several stages, or leave it out")
    return sentences
