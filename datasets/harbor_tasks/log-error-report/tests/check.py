"""The report must equal one that is computed from the log as it was built, not as the agent left it."""

import collections
import random

rng = random.Random(11)
expected, errors = collections.Counter(), collections.Counter()
for month, day in [(1, 31), (2, 1)]:
    for hour in (22, 23) if day == 31 else (0, 1, 2):
        for _ in range(rng.randrange(30, 60)):
            status = rng.choice([200] * 12 + [301, 404, 499, 500, 502, 503])
            rng.choice(range(4))
            [rng.randrange(n) for n in (9, 99, 60, 60, 9999)]
            key = f"2024-{month:02d}-{day:02d}T{hour:02d}"
            expected[key] += 1
            errors[key] += status >= 500
rows = [f"{key},{expected[key]},{errors[key]}" for key in sorted(expected)]
assert open("/app/report.csv").read().split() == ["hour,requests,errors", *rows]
