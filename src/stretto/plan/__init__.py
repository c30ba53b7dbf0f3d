"""Plans, made of pure functions before any device wakes: actions, orders, partitions, timelines; no torch here."""
