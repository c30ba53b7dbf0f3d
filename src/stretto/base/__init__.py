"""What all packages share: errors, windows, states, positional randomness, files and folders."""
