#!/bin/bash
# Proves that the task is solvable; the agent never sees it.
awk '$2 == "ERROR" { sub(":", "", $3); count[$3]++ } END { for (name in count) print name, count[name] }' \
    /app/service.log | sort > /app/errors.txt
