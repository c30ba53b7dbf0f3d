"""The door; the only room that prints."""
