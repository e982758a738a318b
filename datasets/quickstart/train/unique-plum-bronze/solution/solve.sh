#!/bin/sh
cd /app
sort -u plum.txt > bronze.txt
