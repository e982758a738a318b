#!/bin/sh
cd /app
wc -l < apple.txt > coral.txt
