"""The network: blocks, stacks of blocks, and losses. None of it depends on ranks."""
