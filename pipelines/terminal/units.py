"""Readable numbers, sizes and durations."""


def human_count(value: float, unit: str = "", *, named: bool = False) -> str:
    """`12,345` (if `named`, with the unit's plural name, or `1 chunk`), or `1.2 MB` where the unit is bytes."""
    if unit == "bytes":
        return human_bytes(value)
    count = f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"
    if count == "1":
        unit = unit[:-3] + "y" if unit.endswith("ies") else unit.removesuffix("s")
    return f"{count} {unit}" if named else count


def human_bytes(value: float) -> str:
    """`512 B`, `1.2 MB`, `3.4 TB`: powers of 1000."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.0f} B" if not prefix else f"{value:.1f} {prefix}B"
        value /= 1000
    return f"{value:.1f} PB"


def human_seconds(seconds: float) -> str:
    """`3.2 s`, `4 min 05 s`, `2 h 03 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def long_time(seconds: float) -> str:
    """`3.2 s`, `2 h 03 min`, `12.5 days`, `340 years`."""
    if seconds < 2 * 86_400:
        return human_seconds(seconds)
    days = seconds / 86_400
    return f"{days:,.1f} days" if days < 730 else f"{days / 365.25:,.1f} years"


def counted(count: int, noun: str) -> str:
    """`1 token`, `12,345 tokens`."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def times(occurrences: int) -> str:
    """`once`, or `2 times`."""
    return "once" if occurrences == 1 else f"{occurrences:,} times"
