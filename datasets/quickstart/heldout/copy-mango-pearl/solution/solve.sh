#!/bin/sh
cd /app
cp mango.txt pearl.txt
