"""What the user wrote: typed, checked and frozen; no torch here."""
