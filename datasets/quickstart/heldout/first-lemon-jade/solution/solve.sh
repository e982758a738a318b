#!/bin/sh
cd /app
head -n 1 lemon.txt > jade.txt
