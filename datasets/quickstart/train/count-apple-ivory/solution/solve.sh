#!/bin/sh
cd /app
wc -l < apple.txt > ivory.txt
