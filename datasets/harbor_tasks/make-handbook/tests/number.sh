#!/bin/sh
# Numbers the lines of a chapter, under a heading made from its file name.
echo "$1" >> "${NUMBER_LOG:-/dev/null}"
echo "== $(basename "$1" .txt | cut -d- -f2-) =="
awk '{ printf "%d. %s\n", NR, $0 }' "$1"
