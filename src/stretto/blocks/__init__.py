"""The network: blocks, stacks of them, and losses; it knows nothing of ranks."""
