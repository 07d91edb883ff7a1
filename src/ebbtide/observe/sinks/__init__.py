"""Loggers, one file each."""
