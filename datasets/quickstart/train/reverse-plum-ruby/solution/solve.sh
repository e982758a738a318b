#!/bin/sh
cd /app
tac plum.txt > ruby.txt
