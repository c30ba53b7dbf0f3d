"""stretto.planner: what layouts of regions cost on GPUs that are not here: time, as an interval, and memory."""
