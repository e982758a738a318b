#!/bin/sh
cd /app
paste -sd, grape.txt > silver.txt
