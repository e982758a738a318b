#!/bin/sh
cd /app
cp apple.txt coral.txt
