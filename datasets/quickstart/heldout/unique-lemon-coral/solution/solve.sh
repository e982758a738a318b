#!/bin/sh
cd /app
sort -u lemon.txt > coral.txt
