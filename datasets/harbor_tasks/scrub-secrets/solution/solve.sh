#!/bin/bash
set -euo pipefail
cd /app/service
sed -i 's/hunter2-prod/REDACTED/; s/tok_91f0c2/REDACTED/' config.yaml
sed -i 's/tok_5d2e77/REDACTED/; s/swordfish/REDACTED/' app.py
printf '%s\n' '-----BEGIN PRIVATE KEY-----' REDACTED '-----END PRIVATE KEY-----' > deploy.key
