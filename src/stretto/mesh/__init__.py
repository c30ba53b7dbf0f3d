"""World, topology, mesh, channels and collectives; no other package creates process groups."""
