#!/bin/sh
# 1 when the file holds exactly what was asked for, else 0.
if printf 'toad,crow,mole,deer,toad,jay,owl,kite,hare,toad,frog\n' | cmp -s - /app/pearl.txt; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
