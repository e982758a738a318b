#!/bin/sh
cd /app
sort cherry.txt > amber.txt
