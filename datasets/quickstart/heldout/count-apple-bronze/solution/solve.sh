#!/bin/sh
cd /app
wc -l < apple.txt > bronze.txt
