"""A run's config: typed, validated and immutable. This package does not import torch."""
