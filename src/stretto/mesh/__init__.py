"""The only owner of process groups and communication: topology, world, channels, collectives."""
