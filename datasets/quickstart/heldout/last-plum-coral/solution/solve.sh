#!/bin/sh
cd /app
tail -n 1 plum.txt > coral.txt
