#!/bin/sh
set -eu
git init -q -b main /app/shop && cd /app/shop
git config user.name "Sam Shop" && git config user.email sam@shop.example
commit() { git add -A && GIT_AUTHOR_DATE="$1" GIT_COMMITTER_DATE="$1" git commit -q -m "$2"; }
printf 'tax=19\nshipping=5\n' > prices.cfg; commit 2024-01-01T09:00:00Z "Add prices"
printf 'apples\npears\n' > stock.txt; commit 2024-01-02T09:00:00Z "Add stock"
git checkout -q -b feature/discounts
printf 'none\n' > discounts.txt; commit 2024-01-03T09:00:00Z "Start discounts"
printf 'ten percent on mondays\n' > discounts.txt; commit 2024-01-04T09:00:00Z "Decide discounts"
git checkout -q main
printf 'tax=91\nshipping=5\n' > prices.cfg; commit 2024-01-05T09:00:00Z "Tidy the price file"
printf 'apples\npears\nplums\n' > stock.txt; commit 2024-01-06T09:00:00Z "Stock plums"
printf 'tax=91\nshipping=6\n' > prices.cfg; commit 2024-01-07T09:00:00Z "Dearer shipping"
git branch -q -D feature/discounts
git rev-parse HEAD > /app/.main_before
