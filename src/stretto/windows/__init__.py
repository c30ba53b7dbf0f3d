"""What a training step reads: order, batches, lanes, targets; nothing here knows about ranks."""
