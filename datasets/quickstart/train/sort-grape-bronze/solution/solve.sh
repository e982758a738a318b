#!/bin/sh
cd /app
sort grape.txt > bronze.txt
