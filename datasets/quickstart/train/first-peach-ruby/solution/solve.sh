#!/bin/sh
cd /app
head -n 1 peach.txt > ruby.txt
