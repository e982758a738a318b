#!/bin/sh
cd /app
wc -l < peach.txt > amber.txt
