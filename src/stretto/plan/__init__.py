"""Pure planning, without torch: actions, orders, partition, simulation, costs, search."""
