#!/bin/sh
cd /app
sort plum.txt > silver.txt
