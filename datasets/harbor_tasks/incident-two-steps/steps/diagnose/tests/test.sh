#!/bin/sh
reward=1
[ "$(cat /app/cause.txt 2>/dev/null)" = "$(printf 'setting=pool_size\ndeploy=deploy-7731')" ] || reward=0
grep -q '^pool_size=0$' /app/service/worker.conf || reward=0
echo "$reward" > /logs/verifier/reward.txt
