"""Algorithms, one file each: rewards to advantages, log-probs to a loss."""
