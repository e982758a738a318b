#!/bin/sh
cd /app
tac peach.txt > bronze.txt
