#!/bin/sh
# Runs in a sandbox of its own: only the artifact /app/service comes over from the agent's.
if diff -r /app/service /tests/expected >/dev/null 2>&1; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
