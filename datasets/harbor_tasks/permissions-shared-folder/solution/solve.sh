#!/bin/bash
set -euo pipefail
cd /app/team
find . -path ./public -prune -o -type d -exec chmod 2770 {} +
find . -path ./public -prune -o -type f -name '*.sh' -exec chmod 0750 {} +
find . -path ./public -prune -o -type f ! -name '*.sh' -exec chmod 0640 {} +
find public -type d -exec chmod u=rwx,go=rx,g-s {} +
find public -type f -exec chmod 0644 {} +
