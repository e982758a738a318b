#!/bin/sh
cd /app
tac apple.txt > amber.txt
