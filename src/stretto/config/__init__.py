"""The config of a run: typed, checked and frozen. This package does not import torch."""
