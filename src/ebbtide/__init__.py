"""ebbtide post-trains language models by reinforcement learning and on-policy distillation.

Its name is its promise: after every phase memory goes back to low water, and where it does not, ebbtide says which
rank, which phase, how many bytes and who holds them. Start at `ebbtide.loop.sync`; everything else is below it.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
