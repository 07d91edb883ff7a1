"""Metrics, their loggers, and what a person sees."""
