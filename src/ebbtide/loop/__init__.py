"""The training loops; read sync.py first."""
