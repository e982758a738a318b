#!/bin/sh
cd /app
tr a-z A-Z < plum.txt > bronze.txt
