#!/bin/sh
cd /app
tr a-z A-Z < cherry.txt > pearl.txt
