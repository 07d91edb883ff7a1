"""Prompts, packing and sampling order."""
