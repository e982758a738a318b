#!/bin/sh
python3 -I /tests/check.py
