"""Profiles of blocks and links; checks of the laws."""
