#!/bin/sh
cd /app
tac apple.txt > ivory.txt
