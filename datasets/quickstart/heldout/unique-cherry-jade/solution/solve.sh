#!/bin/sh
cd /app
sort -u cherry.txt > jade.txt
