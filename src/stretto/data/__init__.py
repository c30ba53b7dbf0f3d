"""The sequences: corpora on disk and how they are cut; it knows nothing of ranks."""
