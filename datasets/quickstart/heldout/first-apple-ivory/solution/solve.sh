#!/bin/sh
cd /app
head -n 1 apple.txt > ivory.txt
