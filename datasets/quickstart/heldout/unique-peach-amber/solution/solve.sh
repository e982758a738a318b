#!/bin/sh
cd /app
sort -u peach.txt > amber.txt
