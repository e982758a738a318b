"""Compares the module with a brute-force count over random intervals.

The module runs in a process of its own, since it may do anything: this process decides on the reward.
"""

import json
import random
import subprocess
import sys

rng = random.Random(7)
cases = []
for _ in range(300):
    starts = [rng.randrange(-20, 20) for _ in range(rng.randrange(6))]
    cases.append([[start, start + rng.randrange(8)] for start in starts])
answer = subprocess.run(
    [sys.executable, "-I", "/tests/answer.py"], input=json.dumps(cases), stdout=subprocess.PIPE, text=True, timeout=30
)
merged, totals, after = json.loads(answer.stdout)
assert after == cases, "an argument was changed"
for given, found, number in zip(cases, merged, totals, strict=True):
    covered = sorted({n for start, end in given for n in range(start, end + 1)})
    expected = []
    for n in covered:
        if expected and expected[-1][1] == n - 1:
            expected[-1][1] = n
        else:
            expected.append([n, n])
    assert found == expected, (given, found)
    assert number == len(covered), (given, number)
