#!/bin/sh
if python3 -I /tests/check.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
