#!/bin/bash
set -euo pipefail
python3 - <<'PY'
import collections
import datetime
import re

line = re.compile(r'^\S+ \S+ \S+ \[(\d+/\w+/\d+:\d+):[^\]]*\] "[^"]*" (\d{3}) ')
requests, errors = collections.Counter(), collections.Counter()
for text in open("/app/access.log"):
    found = line.match(text)
    if found:
        hour = datetime.datetime.strptime(found[1], "%d/%b/%Y:%H").strftime("%Y-%m-%dT%H")
        requests[hour] += 1
        errors[hour] += int(found[2]) >= 500
with open("/app/report.csv", "w") as out:
    out.write("hour,requests,errors\n")
    out.writelines(f"{hour},{requests[hour]},{errors[hour]}\n" for hour in sorted(requests))
PY
