#!/bin/sh
# 1 when the file holds exactly what was asked for, else 0.
if printf 'newt,crow,newt,jay,deer,rook\n' | cmp -s - /app/jade.txt; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
