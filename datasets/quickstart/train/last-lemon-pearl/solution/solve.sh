#!/bin/sh
cd /app
tail -n 1 lemon.txt > pearl.txt
