"""What a step reads: order, budgets, lanes, targets; it knows nothing about ranks."""
