#!/bin/sh
cd /app
cp grape.txt silver.txt
