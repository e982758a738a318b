#!/bin/sh
cd /app
tail -n 1 mango.txt > pearl.txt
