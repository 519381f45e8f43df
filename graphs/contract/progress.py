"""Progress of long work, as stages report it."""


def reaches_quarter(before: int, done: int, total: int) -> bool:
    """Whether work has reached another quarter of its total, but not its end, which the next stage reports."""
    return before * 4 // total < done * 4 // total < 4
