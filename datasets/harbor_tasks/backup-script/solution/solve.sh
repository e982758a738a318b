#!/bin/bash
set -euo pipefail
cat > /app/backup.sh <<'SH'
#!/bin/sh
# Copies the regular files below $1 to $2 and lists them in $2/MANIFEST.
set -eu
[ $# -eq 2 ] && [ -d "$1" ] || { echo "usage: backup.sh SRC DEST" >&2; exit 2; }
mkdir -p -- "$2"
dest=$(cd -- "$2" && pwd)
cd -- "$1"
list=$(mktemp "$dest/.manifest.XXXXXX")
trap 'rm -f -- "$list"' EXIT
find . -type f ! -path './.manifest.*' -exec sh -c '
  dest=$1; list=$2; shift 2
  for file; do
    file=${file#./}
    mkdir -p -- "$dest/$(dirname -- "$file")" && cp -- "$file" "$dest/$file" || exit 255
    sum=$(sha256sum < "$file") || exit 255
    printf "%s  %s\n" "${sum%% *}" "$file" >> "$list" || exit 255
  done' sh "$dest" "$list" {} +
LC_ALL=C sort -k 2 "$list" > "$list.sorted"
mv -- "$list.sorted" "$dest/MANIFEST"
SH
