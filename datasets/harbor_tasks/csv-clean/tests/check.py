"""Writes a dictionary of rewards: the whole, and what it is made of."""

import csv
import json
import re

EXPECTED = [
    ["Ada Lovelace", "1815-12-10", "Ockham"],
    ["Ada Lovelace", "1990-02-02", "Leeds"],
    ["Alan Turing", "1912-06-23", "Maida Vale"],
    ["Barbara Liskov", "1939-11-07", "Los Angeles"],
    ["Donald Knuth", "1938-01-10", "Milwaukee"],
    ["Grace Hopper", "1906-12-09", "Arlington"],
]
try:
    header, *rows = list(csv.reader(open("/app/clean.csv")))
except (OSError, ValueError):
    header, rows = [], []
people = [tuple(row[:2]) for row in rows]
scores = {
    "rows": len([row for row in EXPECTED if row in rows]) / max(len(EXPECTED), len(rows)),
    "dates": float(bool(rows) and all(len(r) == 3 and re.fullmatch(r"\d{4}-\d\d-\d\d", r[1]) for r in rows)),
    "duplicates": float(bool(people) and len(people) == len(set(people))),
    "order": float(bool(people) and people == sorted(people)),
}
exact = header == ["name", "born", "city"] and rows == EXPECTED
scores["reward"] = 1.0 if exact else round(0.2 * sum(scores.values()), 4)
json.dump(scores, open("/logs/verifier/reward.json", "w"))
