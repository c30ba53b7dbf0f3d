"""The only package that uses process groups: world, topology, mesh, channels, collectives."""
