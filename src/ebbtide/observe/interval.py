"""How sure a share is."""

import math

__all__ = ["wilson_interval"]


def wilson_interval(num_correct: float, num_prompts: int, z: float = 1.96) -> tuple[float, float]:
    """The interval that holds the true share with 95 % confidence (z = 1.96).

    Source: E. B. Wilson, JASA 1927; honest near 0 and 1, where the normal approximation is not.

    Example:
        >>> low, high = wilson_interval(90, 100)
        >>> round(low, 3), round(high, 3)
        (0.826, 0.945)
    """
    if num_prompts == 0:
        return 0.0, 1.0
    share, n = num_correct / num_prompts, num_prompts
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)
