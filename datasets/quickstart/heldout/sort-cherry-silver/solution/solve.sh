#!/bin/sh
cd /app
sort cherry.txt > silver.txt
