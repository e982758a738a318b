#!/bin/bash
# 1 when the file holds exactly what was asked for, else 0. The shell compares by itself: an agent can replace cmp.
if ! IFS= read -rd '' content < /app/jade.txt && [[ $content == $'jay\n' ]]; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
