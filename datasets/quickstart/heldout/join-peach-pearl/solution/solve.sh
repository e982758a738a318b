#!/bin/sh
cd /app
paste -sd, peach.txt > pearl.txt
