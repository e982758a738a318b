#!/bin/sh
cd /app
tr a-z A-Z < mango.txt > coral.txt
