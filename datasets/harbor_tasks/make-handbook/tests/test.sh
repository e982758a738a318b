#!/bin/sh
# Works on a copy, with number.sh as it was shipped, and counts what make really ran.
reward=1
copy=$(mktemp -d) && cp -R /app/handbook/. "$copy" && cp /tests/number.sh "$copy/number.sh" && cd "$copy" || reward=0
rm -rf build handbook.txt
export NUMBER_LOG="$copy/number.log"
ran() { : > "$NUMBER_LOG"; make >/dev/null 2>&1 || reward=0; wc -l < "$NUMBER_LOG"; }
later() { touch -d "$1 seconds" "$2"; }
[ "$(ran)" -eq 3 ] || reward=0
printf 'The Handbook\n== welcome ==\n1. Hello.\n2. Come in.\n== rules ==\n1. Be kind.\n== tools ==\n1. A pen.\n2. A cup.\n' | cmp -s - handbook.txt || reward=0
[ "$(ran)" -eq 0 ] || reward=0
make -q >/dev/null 2>&1 || reward=0
echo "Be early." >> chapters/02-rules.txt; later 5 chapters/02-rules.txt
[ "$(ran)" -eq 1 ] && grep -q "2. Be early." handbook.txt || reward=0
later -60 chapters/02-rules.txt; make >/dev/null 2>&1
echo "The New Handbook" > title.txt; later 10 title.txt
[ "$(ran)" -eq 0 ] && head -1 handbook.txt | grep -q New || reward=0
later -60 title.txt; make >/dev/null 2>&1
echo "Bye." > chapters/04-end.txt
[ "$(ran)" -ge 1 ] && grep -q "1. Bye." handbook.txt || reward=0
later 20 number.sh
[ "$(ran)" -eq 4 ] || reward=0
make clean >/dev/null 2>&1; [ ! -e handbook.txt ] && [ -z "$(ls build 2>/dev/null)" ] || reward=0
echo "$reward" > /logs/verifier/reward.txt
