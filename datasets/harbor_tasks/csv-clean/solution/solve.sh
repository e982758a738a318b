#!/bin/bash
set -euo pipefail
python3 - <<'PY'
import csv
import re

rows = {}
for row in csv.DictReader(open("/app/people.csv")):
    name, born, city = (row[k].strip() for k in ("name", "born", "city"))
    if "," in name:
        family, given = (part.strip() for part in name.split(","))
        name = f"{given} {family}"
    if found := re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", born):
        born = "-".join(reversed(found.groups()))
    if name and born:
        rows[name, born.replace("/", "-")] = city
with open("/app/clean.csv", "w", newline="") as out:
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["name", "born", "city"])
    table.writerows([name, born, city] for (name, born), city in sorted(rows.items()))
PY
