#!/bin/sh
cd /app
cp cherry.txt jade.txt
