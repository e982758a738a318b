#!/bin/sh
cd /app
head -n 1 plum.txt > silver.txt
