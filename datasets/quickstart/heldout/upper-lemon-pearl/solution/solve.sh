#!/bin/sh
cd /app
tr a-z A-Z < lemon.txt > pearl.txt
