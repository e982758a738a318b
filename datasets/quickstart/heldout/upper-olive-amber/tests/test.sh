#!/bin/sh
# 1 when the file holds exactly what was asked for, else 0.
if printf 'GOAT\nDEER\nGOAT\nBEAR\nPONY\nQUAIL\nJAY\nLYNX\nTOAD\nJAY\n' | cmp -s - /app/amber.txt; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
