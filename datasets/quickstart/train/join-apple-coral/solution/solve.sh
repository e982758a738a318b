#!/bin/sh
cd /app
paste -sd, apple.txt > coral.txt
