"""Checks of what only several GPUs can show: how ranks connect, train, fail and save on them."""
