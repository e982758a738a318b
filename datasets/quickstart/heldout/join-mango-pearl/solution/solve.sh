#!/bin/sh
cd /app
paste -sd, mango.txt > pearl.txt
