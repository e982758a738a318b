"""Prints what the agent's module returns for intervals given as JSON: the results, and the arguments after the calls."""

import json
import sys

sys.path.insert(0, "/app")
from intervals import merge, total

given = json.load(sys.stdin)
cases = [[tuple(interval) for interval in case] for case in given]
merged = [merge(case) for case in cases]
json.dump([merged, [total(case) for case in cases], cases], sys.stdout)
