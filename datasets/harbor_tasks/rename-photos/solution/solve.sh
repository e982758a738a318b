#!/bin/bash
set -euo pipefail
cd /app/photos
declare -A count
for photo in *.jpg; do
  base=${photo%.jpg}
  day=$(sed -n 's/^taken: //p' "$base.txt")
  count[$day]=$(( ${count[$day]:-0} + 1 ))
  name=$(printf '%s_%02d' "$day" "${count[$day]}")
  mv -- "$base.jpg" "$name.jpg"
  mv -- "$base.txt" "$name.txt"
done
