"""Compares the module with a brute-force count over random intervals."""

import random
import sys

sys.path.insert(0, "/app")
from intervals import merge, total

rng = random.Random(7)
for _ in range(300):
    given = []
    for _ in range(rng.randrange(6)):
        start = rng.randrange(-20, 20)
        given.append((start, start + rng.randrange(8)))
    before = list(given)
    covered = sorted({n for start, end in given for n in range(start, end + 1)})
    expected = []
    for n in covered:
        if expected and expected[-1][1] == n - 1:
            expected[-1] = (expected[-1][0], n)
        else:
            expected.append((n, n))
    assert [tuple(i) for i in merge(given)] == expected, (before, merge(before))
    assert given == before, "the argument was changed"
    assert total(given) == len(covered), before
