#!/bin/sh
cd /app
cp peach.txt pearl.txt
