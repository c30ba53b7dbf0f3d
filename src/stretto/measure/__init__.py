"""Measures profiles of blocks and links, and checks the chunk law and the layout law."""
