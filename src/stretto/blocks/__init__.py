"""The network: blocks, stacks of blocks, and losses; nothing here knows about ranks."""
