#!/bin/sh
cd /app
tac peach.txt > silver.txt
