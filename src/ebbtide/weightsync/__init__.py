"""Weights from an engine to a rollout: one protocol, one file a medium."""
