"""The memory that some work takes."""

import tracemalloc
from collections.abc import Callable


def least_peak(work: Callable[[], object]) -> int:
    """Bytes that some work takes at its peak: the least of three times, since other OS threads take memory meanwhile."""
    peaks = []
    for _ in range(3):
        tracemalloc.start()
        try:
            work()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    return min(peaks)
