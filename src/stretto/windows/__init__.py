"""Turns data into the windows that training steps read, as batches or as lanes; nothing here knows about ranks."""
