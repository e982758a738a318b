#!/bin/sh
cd /app
sort mango.txt > amber.txt
