#!/bin/bash
set -euo pipefail
cd /app/shop
lost=$(git reflog --all --format='%H %gs' | grep 'Decide discounts' | head -1 | cut -d' ' -f1)
git branch feature/discounts "$lost"
sed -i 's/^tax=91$/tax=19/' prices.cfg
git commit -qam "Restore the tax"
