"""Pictures: pages that open from disk, with no network and nothing to install."""
