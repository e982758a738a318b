#!/bin/sh
cd /app
sort -u plum.txt > jade.txt
