#!/bin/bash
set -euo pipefail
cat > /app/intervals.py <<'PY'
"""Closed integer intervals `(start, end)` with start <= end."""


def merge(intervals):
    """The smallest sorted list of disjoint intervals that covers the same integers."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total(intervals):
    """How many integers the intervals cover, each counted once."""
    return sum(end - start + 1 for start, end in merge(intervals))
PY
