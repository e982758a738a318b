"""Closed integer intervals `(start, end)` with start <= end."""


def merge(intervals):
    """The smallest sorted list of disjoint intervals that covers the same integers.

    Intervals that touch, such as (1, 2) and (3, 4), cover neighbouring integers and become one.
    The argument is left as it was.
    """
    intervals.sort()
    merged = []
    for start, end in intervals:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def total(intervals):
    """How many integers the intervals cover, each counted once."""
    return sum(end - start for start, end in merge(intervals))
