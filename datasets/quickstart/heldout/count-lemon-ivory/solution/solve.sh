#!/bin/sh
cd /app
wc -l < lemon.txt > ivory.txt
