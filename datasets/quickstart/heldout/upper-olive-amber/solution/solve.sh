#!/bin/sh
cd /app
tr a-z A-Z < olive.txt > amber.txt
