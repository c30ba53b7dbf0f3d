"""Sharded arrays on disk or in object storage: pages, checksums, cache."""
