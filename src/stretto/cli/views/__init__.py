"""What the commands print: tables, progress bars, the live view."""
