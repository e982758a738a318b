#!/bin/bash
set -euo pipefail
sed -i 's/^pool_size=.*/pool_size=8/' /app/service/worker.conf
/app/service/worker.sh
echo resolved >> /app/cause.txt
