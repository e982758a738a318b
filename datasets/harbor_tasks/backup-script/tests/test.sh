#!/bin/sh
# A tree with odd names, a failing copy, and an old manifest that must survive the failure.
reward=1
work=$(mktemp -d) && cd "$work" || reward=0
mkdir -p "src/a b" src/empty ./src/-dash
echo 1 > "src/a b/one two.txt"; echo 2 > ./src/-n; echo 3 > ./src/-dash/x; echo 4 > 'src/star*?.txt'; ln -s /etc/passwd src/link
timeout 20 /bin/sh /app/backup.sh "$work/src" "$work/dest dir" >/dev/null 2>&1 || reward=0
sum() { printf '%s\n' "$1" | sha256sum | cut -d' ' -f1; }
{ echo "$(sum 3)  -dash/x"; echo "$(sum 2)  -n"; echo "$(sum 1)  a b/one two.txt"; echo "$(sum 4)  star*?.txt"; } > want
cmp -s want "dest dir/MANIFEST" || reward=0
[ "$(cat "dest dir/a b/one two.txt" 2>/dev/null)" = 1 ] && [ "$(cat "dest dir/star*?.txt" 2>/dev/null)" = 4 ] || reward=0
[ ! -e "dest dir/link" ] || reward=0
# A file lies where a folder must go: the copy cannot succeed, so the script must say so and keep the manifest.
mkdir dest2 && echo old > dest2/MANIFEST && echo blocked > "dest2/a b"
timeout 20 /bin/sh /app/backup.sh "$work/src" "$work/dest2" >/dev/null 2>&1 && reward=0
[ "$(cat dest2/MANIFEST)" = old ] || reward=0
echo "$reward" > /logs/verifier/reward.txt
