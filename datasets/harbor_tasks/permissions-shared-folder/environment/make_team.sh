#!/bin/sh
set -eu
mkdir -p /app/team/plans/old /app/team/public/img /app/team/bin && cd /app/team
echo a > plans/q1.txt; echo b > plans/old/q0.txt; echo c > bin/deploy.sh; echo d > public/index.html
echo e > public/build.sh; echo f > public/img/logo.svg; echo g > "plans/odd
name.txt"
chmod 777 plans bin public/img; chmod 4755 bin/deploy.sh; chmod 600 public/index.html; chmod 666 plans/q1.txt; chmod 2755 public
