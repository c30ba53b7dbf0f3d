"""Manifests that run a config on the nodes of a Kubernetes cluster."""
