"""Starting the world: the ranks of this machine."""
