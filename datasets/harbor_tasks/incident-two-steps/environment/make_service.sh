#!/bin/sh
set -eu
mkdir -p /app/service/logs && cd /app/service
cat > worker.conf <<'CONF'
queue=orders
pool_size=0
timeout=30
CONF
cat > worker.sh <<'SH'
#!/bin/sh
# Prints how many workers would start; fails when none can.
dir=$(dirname "$0")
size=$(sed -n 's/^pool_size=//p' "$dir/worker.conf")
[ "${size:-0}" -gt 0 ] || { echo "no workers: pool_size=$size" >&2; exit 1; }
echo "$size workers on $(sed -n 's/^queue=//p' "$dir/worker.conf")"
SH
chmod +x worker.sh
i=0
while [ $i -lt 200 ]; do
  echo "2024-03-01T10:$(printf %02d $((i / 4))):00 INFO request $i accepted"; i=$((i + 1))
done > logs/api.log
{ echo "2024-03-01T10:20:13 INFO config reloaded by deploy-7731: pool_size 8 -> 0"
  echo "2024-03-01T10:20:14 ERROR no workers: pool_size=0"
  echo "2024-03-01T10:20:15 WARN queue orders is growing"; } >> logs/worker.log
