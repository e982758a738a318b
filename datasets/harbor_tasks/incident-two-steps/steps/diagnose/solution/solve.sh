#!/bin/bash
set -euo pipefail
line=$(grep 'config reloaded' /app/service/logs/worker.log)
printf 'setting=%s\ndeploy=%s\n' pool_size "$(sed 's/.*by \(deploy-[0-9]*\).*/\1/' <<<"$line")" > /app/cause.txt
