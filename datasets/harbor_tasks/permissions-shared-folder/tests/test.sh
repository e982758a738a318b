#!/bin/sh
reward=1
cd /app/team || reward=0
is() { [ "$(stat -c %a "$2" 2>/dev/null)" = "$1" ] || { echo "$2: not $1"; reward=0; }; }
for d in . plans plans/old bin; do is 2770 "$d"; done
is 750 bin/deploy.sh
is 640 plans/q1.txt; is 640 plans/old/q0.txt
is 640 "plans/odd
name.txt"
is 755 public; is 755 public/img
for f in index.html build.sh img/logo.svg; do is 644 "public/$f"; done
[ "$(cat plans/q1.txt plans/old/q0.txt bin/deploy.sh public/index.html public/build.sh public/img/logo.svg | tr -d '\n')" = abcdef ] || reward=0
echo "$reward" > /logs/verifier/reward.txt
