#!/bin/sh
# 1 when the file holds exactly what was asked for, else 0.
if printf 'bear,bear,newt,lynx,kite,goat,lynx\n' | cmp -s - /app/silver.txt; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
