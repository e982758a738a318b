#!/bin/bash
# The shell compares by itself: an agent can replace python3, diff and cmp.
if [[ "$(< /app/report.csv)" == "$(< /tests/expected.csv)" ]]; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
