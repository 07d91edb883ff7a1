"""Arithmetic on log-probs: no model, no engine."""
