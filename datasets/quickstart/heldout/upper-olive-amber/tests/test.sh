#!/bin/bash
# 1 when the file holds exactly what was asked for, else 0. The shell compares by itself: an agent can replace cmp.
if ! IFS= read -rd '' content < /app/amber.txt && [[ $content == $'GOAT\nDEER\nGOAT\nBEAR\nPONY\nQUAIL\nJAY\nLYNX\nTOAD\nJAY\n' ]]; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
