#!/bin/sh
reward=1
cd /app/shop || reward=0
git() { command git -c safe.directory='*' "$@"; }
[ "$(git show feature/discounts:discounts.txt 2>/dev/null)" = "ten percent on mondays" ] || reward=0
[ "$(git log -1 --format=%s feature/discounts 2>/dev/null)" = "Decide discounts" ] || reward=0
[ "$(git show main:prices.cfg)" = "$(printf 'tax=19\nshipping=6')" ] || reward=0
[ "$(git show main:stock.txt)" = "$(printf 'apples\npears\nplums')" ] || reward=0
before=$(git log --format='%H %s' main | sed -n 's/ Dearer shipping$//p')
[ -n "$before" ] && git merge-base --is-ancestor "$before" main || reward=0
[ "$(git log --format=%cI -1 "$before" | cut -c1-10)" = 2024-01-07 ] || reward=0
[ "$(git rev-list --count "$before..main")" -ge 1 ] || reward=0
echo "$reward" > /logs/verifier/reward.txt
