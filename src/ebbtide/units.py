"""The one place where numbers become text with a unit; everywhere else they are plain SI or byte counts."""

__all__ = ["GIB", "KIB", "MIB", "TIB", "format_bytes", "format_count", "format_seconds"]

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB


def format_bytes(num_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves at least one whole digit.

    Example:
        >>> format_bytes(1536), format_bytes(-3 * GIB), format_bytes(12)
        ('1.5 KiB', '-3.0 GiB', '12 B')
    """
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        smaller = abs(num_bytes) / (size / KIB)
        if round(smaller, 0 if size == KIB else 1) >= KIB:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """A duration as a person would say it.

    Example:
        >>> format_seconds(0.0123), format_seconds(3.21), format_seconds(125), format_seconds(7322)
        ('12 ms', '3.2 s', '2:05', '2:02:02')
    """
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if round(seconds * 1000) < 1000:
        return f"{seconds * 1000:.1f} ms" if 0 < seconds < 0.001 else f"{seconds * 1000:.0f} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_count(count: float) -> str:
    """A count with a decimal suffix.

    Example:
        >>> format_count(950), format_count(151_936), format_count(7.6e9)
        ('950', '151.9k', '7.6G')
    """
    for suffix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        smaller = abs(count) / (size / 1000)
        if round(smaller, 0 if size == 1e3 else 1) >= 1000:
            return f"{count / size:.1f}{suffix}"
    return f"{count:.0f}"
