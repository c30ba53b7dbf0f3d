"""The only package that creates process groups: world, topology, mesh, channels, collectives."""
