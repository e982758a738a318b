#!/bin/sh
cd /app
tail -n 1 olive.txt > jade.txt
