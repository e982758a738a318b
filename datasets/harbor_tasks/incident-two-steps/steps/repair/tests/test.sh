#!/bin/sh
reward=1
[ "$(cat /app/service/worker.conf 2>/dev/null)" = "$(printf 'queue=orders\npool_size=8\ntimeout=30')" ] || reward=0
[ "$(tail -1 /app/cause.txt 2>/dev/null)" = resolved ] || reward=0
echo "$reward" > /logs/verifier/reward.txt
